"""Libraries that shard models by torch's own FSDP, run twice: as they are, and on ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.wrappers import install, uninstall

VOCABULARY = 64


@dataclass(kw_only=True)
class Run:
    """What one run of a library gave.

    Attributes:
        engine: the package whose code sharded the model.
        losses: one per step, then whatever else was measured.
        norms: of the gradients, before clipping.
        resumed: losses of a second run from what the first one saved, and what follows them.
        weights: the whole model at the end, on the first rank.
        files: what was saved.
    """

    engine: str
    losses: list[float]
    norms: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


def beside_torch(run: Callable[[Path], Run], folder: Path, *, tolerance: float = 0.0) -> Run:
    """Returns what ``run`` gives on ours, which is what it gives on torch's own.

    Args:
        run: the program; it saves into the folder that it is given.
        folder: of both runs.
        tolerance: by how much numbers may differ; FSDP1 adds the squares of one flat parameter
            where ours adds those of each, for a norm.
    """
    for name in ("torch", "ours"):
        (folder / name).mkdir(exist_ok=True)
    theirs = run(folder / "torch")
    install()
    try:
        ours = run(folder / "ours")
    finally:
        uninstall()
    assert (theirs.engine, ours.engine) == ("torch", "fullshard")
    assert ours.files == theirs.files
    assert ours.weights.keys() == theirs.weights.keys()
    for name, value in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=tolerance, atol=tolerance)
    for our, right in (
        (ours.losses, theirs.losses),
        (ours.norms, theirs.norms),
        (ours.resumed, theirs.resumed),
    ):
        torch.testing.assert_close(our, right, rtol=tolerance, atol=tolerance)
    assert len(set(ours.losses)) > 1  # it was trained
    return ours


def engine_of(model: Any) -> str:
    """Whose class shards ``model``: that of a wrapper, or the one mixed into its own."""
    names = {kind.__module__.partition(".")[0] for kind in type(model).__mro__[:3]}
    return "fullshard" if "fullshard" in names else "torch"


def batch(step: int) -> torch.Tensor:
    """Tokens ``[2, 8]``, others on each rank and at each step."""
    drawn = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, VOCABULARY, (2, 8), generator=drawn)


def tiny_llama(*, tied: bool = False) -> Any:
    """A Llama of two layers, with the same values at each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def shard_on_cpu(arguments: Callable[[], Any]) -> Any:
    """Returns what ``arguments()`` gives, for an Accelerate that then shards on CPU ranks, too.

    It takes an FSDP plugin on accelerators only, so it is told that this is several of those, whose
    device is the CPU. Begins anew: what it keeps in the process is forgotten.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    given = arguments()
    PartialState(cpu=True)
    shared = PartialState._shared_state
    shared["distributed_type"] = DistributedType.MULTI_GPU
    shared["device"] = torch.device("cpu")
    return given
