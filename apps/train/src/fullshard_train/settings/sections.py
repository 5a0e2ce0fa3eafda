"""The sections of a config: frozen dataclasses that pydantic checks where they are built.

Owns what each setting means and which values it may have. Has no defaults: default.toml is the one
place that names them. `fullshard_train.settings.config` turns pydantic's errors into ours.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DigitsConfig",
    "HFConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RunConfig",
    "SampleConfig",
    "TrainConfig",
]

# Strict: a TOML string is no number. An int may stand for a float. A config is read by many
# modules, and only `dataclasses.replace`, which checks again, makes another one.
STRICT = ConfigDict(strict=True, extra="forbid")

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
FinitePositive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FiniteOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
HFDtype = Literal["auto", "float32", "bfloat16", "float16"]


def _require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise an error that names `field`, where a rule of pydantic's does not say what is wrong."""
    if not condition:
        told = {"field": field, "value": value, "allowed": allowed}
        raise PydanticCustomError("setting", "must be {allowed}", told)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RunConfig:
    """The task, and the output files of a run (see default.toml)."""

    task: Literal["text", "digits", "hf"]
    directory: str
    metrics: Literal["jsonl", "tensorboard"]
    logger: str
    logger_patience: FinitePositive
    slow_ranks: CountOrZero
    export: str

    def __post_init__(self) -> None:
        module, colon, function = self.logger.partition(":")
        named = bool(module and colon and function.isidentifier())
        _require(not self.logger or named, "logger", self.logger, '"" or "module:function"')


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class DataConfig:
    """What is learned: the corpus and how it is cut (see `fullshard_train.text.corpus`)."""

    source: Text
    block_bytes: Count
    held_out_every: Annotated[int, Field(ge=2)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The shape of the model (see `fullshard_train.text.model`)."""

    layers: Count
    width: Count
    heads: Count
    context: Count
    expansion: Count
    tied: bool

    def __post_init__(self) -> None:
        allowed = f"a multiple of 2 * heads = {2 * self.heads} (rotary positions turn pairs)"
        _require(self.width % (2 * self.heads) == 0, "width", self.width, allowed)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class DigitsConfig:
    """The image classifier and what it is judged on (see `fullshard_train.digits.task`)."""

    channels: Count
    layers: Count
    width: Count
    heads: Count
    held_out_every: Annotated[int, Field(ge=2)]

    def __post_init__(self) -> None:
        allowed = f"a multiple of heads = {self.heads}"
        _require(self.width % self.heads == 0, "width", self.width, allowed)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class HFConfig:
    """The model of transformers, how it is trained, and how texts become rows (see `hf`)."""

    model: str
    weights: Literal["folder", "random"]
    tokenizer: Literal["auto", "bytes"]
    text_key: str
    learn: Literal["completions", "all"]
    block: Annotated[int, Field(ge=2)]
    packing: Literal["documents", "crossing", "none"]
    long_documents: Literal["error", "split", "truncate"]
    attention: str
    method: Literal["full", "lora"]
    lora_rank: Count
    lora_alpha: Positive
    lora_dropout: BelowOne
    lora_targets: str
    lora_dora: bool
    lora_modules_to_save: str
    base_dtype: HFDtype
    shard_over: Literal["world", "host"]
    save_dtype: HFDtype
    max_shard_size: str

    def __post_init__(self) -> None:
        allowed = "all-linear, or names of modules with commas between"
        named = all(name.strip() for name in self.lora_targets.split(","))
        _require(named, "lora_targets", self.lora_targets, allowed)
        size = re.fullmatch(r"\d+(\.\d+)? ?([KMGT]i?)?B", self.max_shard_size)
        _require(size is not None, "max_shard_size", self.max_shard_size, "a size, such as 5GB")


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class TrainConfig:
    """The loop: how many updates, of what batch, and how often to look."""

    steps: Count
    batch: Count
    accumulate: Count
    seed: CountOrZero
    activation_checkpointing: bool
    deterministic: bool
    log_every: Count
    evaluate_every: Count
    held_out_rows: Count
    profile_steps: str

    def __post_init__(self) -> None:
        allowed = f"a multiple of train.accumulate = {self.accumulate}"
        _require(self.batch % self.accumulate == 0, "batch", self.batch, allowed)
        allowed = f'"" or "first:last", from 1 to train.steps = {self.steps}'
        within = 1 <= self.profiled.start < self.profiled.stop <= self.steps + 1
        _require(not self.profile_steps or within, "profile_steps", self.profile_steps, allowed)

    @property
    def profiled(self) -> range:
        """The steps to profile, counted from 1; empty where there are none."""
        found = re.fullmatch(r"(\d+):(\d+)", self.profile_steps)
        return range(0) if found is None else range(int(found[1]), int(found[2]) + 1)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class OptimConfig:
    """The optimiser, its learning-rate schedule and gradient clipping."""

    optimizer: Literal["adamw", "muon", "soap", "adamw8bit"]
    learning_rate: FinitePositive
    final_fraction: Fraction
    warmup_steps: CountOrZero
    weight_decay: FiniteOrZero
    beta1: BelowOne
    beta2: BelowOne
    epsilon: FinitePositive
    clip_norm: Positive  # inf clips nothing


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ParallelConfig:
    """How the model is laid over the ranks, and the dtypes that travel."""

    device: Literal["auto", "cpu", "cuda"]
    mesh: int | str  # 0: all ranks; or a number of ranks, or replicas x shards, such as 2x2
    param_dtype: Literal["auto", "float32", "bfloat16"]
    reduce_dtype: Literal["float32", "bfloat16"]
    wire_dtype: Literal[
        "as computed",
        "bfloat16",
        "int8",
        "int8 both ways",
        "int8 both ways with error feedback",
    ]
    zero: Literal[1, 2, 3]
    reshard_after_forward: bool
    peak_flops: FiniteOrZero  # of one device; 0: by its name

    def __post_init__(self) -> None:
        allowed = "0 (all ranks), a number of ranks, or replicas x shards such as 2x4"
        sizes = re.fullmatch(r"\d+|[1-9]\d*x[1-9]\d*", str(self.mesh), re.ASCII)
        _require(sizes is not None, "mesh", self.mesh, allowed)

    def sizes(self, ranks: int) -> tuple[int, int]:
        """How many replicas of how many shards `mesh` means in a world of `ranks`."""
        replicas, _, shards = str(self.mesh or ranks).rpartition("x")
        return int(replicas or 1), int(shards)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """The interval and number of checkpoints, and whether training continues during a save."""

    every: Count
    keep: CountOrZero
    background: bool
    memory: CountOrZero


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SampleConfig:
    """The text generated at the end."""

    prompt: Text
    chat: bool
    length: CountOrZero
    temperature: FinitePositive
