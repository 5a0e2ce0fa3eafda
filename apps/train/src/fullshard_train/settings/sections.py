"""The sections of a config: frozen dataclasses, each checked where it is built.

Owns what each setting means and which values it may have. Refuses defaults: default.toml is the one
place that names them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fullshard_train.errors import TrainError

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


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise TrainError(f"config {name} = {value!r}: must be {allowed}")


def _require_at_least(section: object, name: str, fields: Mapping[str, int]) -> None:
    for field, least in fields.items():
        value = getattr(section, field)
        _require(value >= least, f"{name}.{field}", value, f"at least {least}")


def _require_one_of(section: object, name: str, field: str, allowed: Sequence[str]) -> None:
    value = getattr(section, field)
    _require(value in allowed, f"{name}.{field}", value, f"one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The task, and the output files of a run (see default.toml)."""

    task: str
    directory: str
    metrics: str
    logger: str
    logger_patience: float
    export: str

    def __post_init__(self) -> None:
        _require_one_of(self, "run", "task", ("text", "digits", "hf"))
        _require_one_of(self, "run", "metrics", ("jsonl", "tensorboard"))
        module, colon, function = self.logger.partition(":")
        _require(
            not self.logger or bool(module and colon and function.isidentifier()),
            "run.logger",
            self.logger,
            '"" or "module:function"',
        )
        _require(
            0 < self.logger_patience < math.inf,
            "run.logger_patience",
            self.logger_patience,
            "a finite number of seconds above 0",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is learned: the corpus and how it is cut (see `fullshard_train.text.corpus`)."""

    source: str
    block_bytes: int
    held_out_every: int

    def __post_init__(self) -> None:
        _require(bool(self.source), "data.source", self.source, "stdlib, a file, a glob or -")
        _require_at_least(self, "data", {"block_bytes": 1, "held_out_every": 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of the model (see `fullshard_train.text.model`)."""

    layers: int
    width: int
    heads: int
    context: int
    expansion: int
    tied: bool

    def __post_init__(self) -> None:
        fields = ("layers", "width", "heads", "context", "expansion")
        _require_at_least(self, "model", dict.fromkeys(fields, 1))
        _require(
            self.width % (2 * self.heads) == 0,
            "model.width",
            self.width,
            f"a multiple of 2 * heads = {2 * self.heads} (rotary positions turn pairs)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitsConfig:
    """The image classifier and what it is judged on (see `fullshard_train.digits.task`)."""

    channels: int
    layers: int
    width: int
    heads: int
    held_out_every: int

    def __post_init__(self) -> None:
        fields = ("channels", "layers", "width", "heads")
        _require_at_least(self, "digits", {**dict.fromkeys(fields, 1), "held_out_every": 2})
        _require(
            self.width % self.heads == 0,
            "digits.width",
            self.width,
            f"a multiple of heads = {self.heads}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HFConfig:
    """The model of transformers, how it is trained, and how texts become rows (see `hf`)."""

    model: str
    weights: str
    tokenizer: str
    text_key: str
    learn: str
    block: int
    packing: str
    long_documents: str
    attention: str
    method: str
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_targets: str
    lora_dora: bool
    lora_modules_to_save: str
    base_dtype: str
    shard_over: str
    save_dtype: str
    max_shard_size: str

    def __post_init__(self) -> None:
        dtypes = ("auto", "float32", "bfloat16", "float16")
        for field, allowed in {
            "weights": ("folder", "random"),
            "tokenizer": ("auto", "bytes"),
            "learn": ("completions", "all"),
            "packing": ("documents", "crossing", "none"),
            "long_documents": ("error", "split", "truncate"),
            "method": ("full", "lora"),
            "base_dtype": dtypes,
            "shard_over": ("world", "host"),
            "save_dtype": dtypes,
        }.items():
            _require_one_of(self, "hf", field, allowed)
        _require_at_least(self, "hf", {"block": 2, "lora_rank": 1})
        _require(self.lora_alpha > 0, "hf.lora_alpha", self.lora_alpha, "above 0")
        _require(0 <= self.lora_dropout < 1, "hf.lora_dropout", self.lora_dropout, "in [0, 1)")
        _require(
            all(name.strip() for name in self.lora_targets.split(",")),
            "hf.lora_targets",
            self.lora_targets,
            "all-linear, or names of modules with commas between",
        )
        _require(
            re.fullmatch(r"\d+(\.\d+)? ?([KMGT]i?)?B", self.max_shard_size) is not None,
            "hf.max_shard_size",
            self.max_shard_size,
            "a size, such as 5GB",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The loop: how many updates, of what batch, and how often to look."""

    steps: int
    batch: int
    accumulate: int
    seed: int
    activation_checkpointing: bool
    deterministic: bool
    log_every: int
    evaluate_every: int
    held_out_rows: int
    profile_steps: str

    def __post_init__(self) -> None:
        fields = ("steps", "batch", "accumulate", "log_every", "evaluate_every", "held_out_rows")
        _require_at_least(self, "train", {**dict.fromkeys(fields, 1), "seed": 0})
        _require(
            self.batch % self.accumulate == 0,
            "train.batch",
            self.batch,
            f"a multiple of train.accumulate = {self.accumulate}",
        )
        first, last = self.profiled.start, self.profiled.stop - 1
        _require(
            not self.profile_steps or 1 <= first <= last <= self.steps,
            "train.profile_steps",
            self.profile_steps,
            f'"" or "first:last", from 1 to train.steps = {self.steps}',
        )

    @property
    def profiled(self) -> range:
        """The steps to profile, counted from 1; empty where there are none."""
        found = re.fullmatch(r"(\d+):(\d+)", self.profile_steps)
        return range(0) if found is None else range(int(found[1]), int(found[2]) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The optimiser, its learning-rate schedule and gradient clipping."""

    optimizer: str
    learning_rate: float
    final_fraction: float
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    clip_norm: float

    def __post_init__(self) -> None:
        _require_one_of(self, "optim", "optimizer", ("adamw", "muon", "soap", "adamw8bit"))
        for field in ("learning_rate", "epsilon"):
            value = getattr(self, field)
            _require(0 < value < math.inf, f"optim.{field}", value, "a finite number above 0")
        _require(
            self.clip_norm > 0, "optim.clip_norm", self.clip_norm, "above 0 (inf clips nothing)"
        )
        _require(
            0 <= self.weight_decay < math.inf, "optim.weight_decay", self.weight_decay, "at least 0"
        )
        _require(
            0 <= self.final_fraction <= 1, "optim.final_fraction", self.final_fraction, "in [0, 1]"
        )
        for field in ("beta1", "beta2"):
            value = getattr(self, field)
            _require(0 <= value < 1, f"optim.{field}", value, "in [0, 1)")
        _require_at_least(self, "optim", {"warmup_steps": 0})


WIRE_DTYPES = (
    "as computed",
    "bfloat16",
    "int8",
    "int8 both ways",
    "int8 both ways with error feedback",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model is laid over the ranks, and the dtypes that travel."""

    device: str
    mesh: int
    param_dtype: str
    reduce_dtype: str
    wire_dtype: str
    reshard_after_forward: bool
    peak_flops: float

    def __post_init__(self) -> None:
        _require_one_of(self, "parallel", "device", ("auto", "cpu", "cuda"))
        _require_one_of(self, "parallel", "param_dtype", ("auto", "float32", "bfloat16"))
        _require_one_of(self, "parallel", "reduce_dtype", ("float32", "bfloat16"))
        _require_one_of(self, "parallel", "wire_dtype", WIRE_DTYPES)
        _require_at_least(self, "parallel", {"mesh": 0})
        allowed = "FLOP/s of one device, or 0: by its name"
        _require(0 <= self.peak_flops < math.inf, "parallel.peak_flops", self.peak_flops, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """The interval and number of checkpoints, and whether training continues during a save."""

    every: int
    keep: int
    background: bool

    def __post_init__(self) -> None:
        _require_at_least(self, "checkpoint", {"every": 1, "keep": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """The text generated at the end."""

    prompt: str
    chat: bool
    length: int
    temperature: float

    def __post_init__(self) -> None:
        _require(bool(self.prompt), "sample.prompt", self.prompt, "at least one byte of text")
        _require_at_least(self, "sample", {"length": 0})
        _require(0 < self.temperature < math.inf, "sample.temperature", self.temperature, "above 0")
