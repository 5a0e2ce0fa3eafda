"""Which of our objects stands for which of torch's, and where in torch they are looked up.

Owns both lists. No package may import ``torch.distributed.fsdp``, which is the rival; this is the
one place that reaches it, by name, because its names are what is replaced. Its functions are not
called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fullshard.sharding import FSDPModule
from fullshard.wrappers import fsdp, fsdp1
from fullshard.wrappers.compat import checkpoint_helpers
from fullshard.wrappers.install.private import FSDPState, lazy_init, of_module, shown_state

__all__ = ["PLACES", "added", "bound_before", "helpers", "pairs", "shown"]

PLACES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.api",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp._fully_shard",
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
_ENGINE = "torch.distributed.fsdp._fully_shard._fully_shard"
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
_RUNTIME = "torch.distributed.fsdp._runtime_utils"
_KEPT = ("torch.distributed.pipelining.schedules", "torch.distributed.pipelining.stage")


def bound_before() -> None:
    """Imports what is to find torch's own names, or to have them replaced.

    Pipeline schedules and stages drive torch's class by its private state, so they keep testing for
    it, and take a module of ours for an ordinary one. ``PipelineStage`` is ours, which knows it.
    """
    for name in (*PLACES, *_KEPT, _ENGINE, _STATE, _RUNTIME):
        import_module(name)


def pairs() -> list[tuple[object, object]]:
    """Return torch's objects, each with ours."""
    found: list[tuple[object, object]] = []
    for place, doors in _OURS:
        theirs, ours = vars(import_module(place)), vars(import_module(doors))
        found += [(theirs[name], ours[name]) for name in ours["__all__"] if name in theirs]
    return found


def shown() -> list[tuple[str, str, object]]:
    """Return module, name and our object for each name that torch's engine itself uses.

    Code outside of the module gets our object; the module's own functions keep torch's. A library
    that imported the name before gets ours, too.
    """
    state, runtime = vars(import_module(_STATE)), vars(import_module(_RUNTIME))
    public = vars(import_module(_ENGINE))
    found = [(_ENGINE, name, vars(fsdp)[name]) for name in fsdp.__all__ if name in public]
    return [
        *found,
        (_STATE, "_get_module_fsdp_state", of_module(state["_get_module_fsdp_state"])),
        (_STATE, "FSDPState", FSDPState),
        (_RUNTIME, "_lazy_init", lazy_init(runtime["_lazy_init"])),
    ]


def added() -> list[tuple[Any, str, object]]:
    """Return object, name and value of each private attribute to add to our objects."""
    return [(FSDPModule, "_get_fsdp_state", shown_state), (fsdp.fully_shard, "state", shown_state)]


def helpers() -> list[tuple[str, str, object]]:
    """Return module, name and what to put there, for what only one module of torch looks up."""
    ours = vars(import_module(_STAGES))["PipelineStage"]
    stage = ("torch.distributed.pipelining.stage", "PipelineStage", ours)
    return [stage, *checkpoint_helpers(fsdp1.FullyShardedDataParallel, fsdp1.ShardingStrategy)]
