"""Which of our objects stands for which of torch's, and where in torch they are looked up.

Owns both lists. No package may import ``torch.distributed.fsdp``, which is the rival; this is the
one place that reaches it, by name, because its names are what is replaced. Nothing of it is called.
"""

from __future__ import annotations

from importlib import import_module

from fullshard.wrappers import fsdp1
from fullshard.wrappers.compat import checkpoint_helpers

__all__ = ["PLACES", "bound_before", "helpers", "pairs"]

PLACES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.api",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
)
"""The modules of torch in which names are replaced; its engines keep their own."""

_STAGES = "fullshard.wrappers.pipelining"  # imports torch's, so only once something is installed
_OURS = (
    ("torch.distributed.fsdp", "fullshard.wrappers.fsdp"),
    ("torch.distributed.fsdp", "fullshard.wrappers.fsdp1"),
    ("torch.distributed._composable.replicate_with_fsdp", "fullshard.wrappers.replicate"),
    ("torch.distributed.pipelining", _STAGES),
)
_KEPT = ("torch.distributed.pipelining.schedules", "torch.distributed.pipelining.stage")


def bound_before() -> None:
    """Imports what is to find torch's own names, or to have them replaced.

    Pipeline schedules and stages drive torch's class by its private state, so they keep testing for
    it, and take a module of ours for an ordinary one. ``PipelineStage`` is ours, which knows it.
    """
    for name in (*PLACES, *_KEPT):
        import_module(name)


def pairs() -> list[tuple[object, object]]:
    """Returns torch's objects, each with ours."""
    found: list[tuple[object, object]] = []
    for place, doors in _OURS:
        theirs, ours = vars(import_module(place)), vars(import_module(doors))
        found += [(theirs[name], ours[name]) for name in ours["__all__"] if name in theirs]
    return found


def helpers() -> list[tuple[str, str, object]]:
    """Returns module, name and what to put there, for what only one module of torch looks up."""
    ours = vars(import_module(_STAGES))["PipelineStage"]
    stage = ("torch.distributed.pipelining.stage", "PipelineStage", ours)
    return [stage, *checkpoint_helpers(fsdp1.FullyShardedDataParallel, fsdp1.ShardingStrategy)]
