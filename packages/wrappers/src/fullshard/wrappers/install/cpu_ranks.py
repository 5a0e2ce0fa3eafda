"""Accelerate on CPU ranks, where it ignores a plugin for FSDP and takes DistributedDataParallel.

Owns the warning, and the switch that lets Accelerate shard. Accelerate takes the plugin if its
state reports several accelerators. The switch makes the state report this for ranks on the CPU.
Names of Accelerate 1.15; without these names nothing happens.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MODULE", "watched_init"]

MODULE = "accelerate.state"
"""The module with the classes of Accelerate's state."""


def watched_init(state: Any, *, shard: bool) -> tuple[type, Callable[..., None]] | None:
    """Return the class whose ``__init__`` decides how to train, and the method to put there.

    Args:
        state: the module.
        shard: whether to shard on CPU ranks; otherwise warn where that was asked for.
    """
    kinds = ("AcceleratorState", "PartialState", "DistributedType")
    if not all(hasattr(state, each) for each in kinds):
        return None
    original = state.AcceleratorState.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        first = not state.AcceleratorState._shared_state  # later instances share what it decided
        wanted = first and _wants_sharding(given)
        if wanted and shard:
            _claim_accelerators(state, given)
        original(self, *args, **kwargs)
        if wanted and self.distributed_type == state.DistributedType.MULTI_CPU:
            warnings.warn(
                "this program asks Accelerate for FSDP, but Accelerate does not shard on CPU ranks:"
                " the model will be trained by DistributedDataParallel, without fullshard. To shard"
                " on the CPU, start it with python -m fullshard.wrappers.install --shard-on-cpu, or"
                " call install(shard_on_cpu=True)",
                stacklevel=2,
            )

    return state.AcceleratorState, initialise


def _wants_sharding(given: dict[str, Any]) -> bool:
    by_environment = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    return by_environment or given.get("fsdp_plugin") is not None


def _claim_accelerators(state: Any, given: dict[str, Any]) -> None:
    """Let the state of CPU ranks say that they are several accelerators."""
    shared = state.PartialState._shared_state
    if not shared:
        cpu = given.get("cpu", False) or os.environ.get("ACCELERATE_USE_CPU", "") in ("true", "1")
        state.PartialState(cpu, **given.get("kwargs", {}))
    if shared.get("distributed_type") == state.DistributedType.MULTI_CPU:
        shared["distributed_type"] = state.DistributedType.MULTI_GPU
        shared["device"] = torch.device("cpu")
