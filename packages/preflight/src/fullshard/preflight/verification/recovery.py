"""Lets ranks that part leave nothing behind, so that later verifications work.

In each step ranks meet before they communicate, so what would part them is not launched: in the
first step before each collective of fullshard's, later before the forward of each sharded module.
Where ranks parted nevertheless, the shared memory of their process group is out of use for good;
verifications there do without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import (
    CollectiveMismatchError,
    EventKind,
    PeerLostError,
)
from fullshard.comm.spi import Launch
from fullshard.insight import debug_mode
from fullshard.insight.spi import DesyncDetector
from fullshard.policies import CanonicalOrder
from fullshard.preflight.compat import default_store
from fullshard.preflight.verification.names import clean
from fullshard.samehost import SharedMemoryError, same_host_transport, set_shared_memory
from fullshard.samehost.spi import shares_memory
from fullshard.sharding import ShardedState
from fullshard.sharding.spi import state_of

__all__ = ["meeting", "recovering"]

_T = TypeVar("_T")

_PATIENCE = 300.0  # seconds between two collectives, in which a rank may compile

_parted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_detectors: weakref.WeakKeyDictionary[dist.ProcessGroup, DesyncDetector]
_detectors = weakref.WeakKeyDictionary()


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "verify checks it"
    return world


def recovering(run: Callable[[], _T]) -> _T:
    """Return ``run()``, a verification; on all ranks.

    If the shared memory of the process group is found to be out of use, it runs again without, and
    so do all later ones.
    """
    world = _world()
    if world not in _parted:
        try:
            return run()
        except Exception as error:
            if not any(
                _tells_of(kind, error) for kind in (SharedMemoryError, PeerLostError, _UnmetError)
            ):
                raise
            _parted.add(world)
    same_host_transport(world)  # so that the next line has the user's setting
    shared = shares_memory(world, torch.device("cpu"))
    set_shared_memory(False)
    try:
        return run()
    finally:
        set_shared_memory(shared)


class _UnmetError(RuntimeError):
    """Ranks parted in a collective before which they did not meet."""


def _tells_of(kind: type[Exception], error: Exception) -> bool:
    """Whether it was an error of that kind that ended the verification, here or on another rank."""
    return isinstance(error, kind) or kind.__name__ in str(error)


def meeting(step: int, model: nn.Module) -> AbstractContextManager[None]:
    """Return a context for the sharded model's forward and backward of a step; on all ranks."""
    if dist.get_world_size() == 1:
        return nullcontext()
    if step == 0 or _world() in _parted:
        return debug_mode(timeout=_PATIENCE)
    return _meeting_in_forward(model)


@contextmanager
def _meeting_in_forward(model: nn.Module) -> Iterator[None]:
    detector, failed = _detector(), list[str]()

    def meet(name: str, module: nn.Module, inputs: Any) -> None:
        if not _gathers(module):
            return
        call = Launch(kind=EventKind.ALL_GATHER, name=name, nbytes=0, detail="in forward")
        try:
            detector.meet(call, _world(), _PATIENCE)
        except CollectiveMismatchError:
            failed.append(name)
            raise

    detector.begin()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if _may_gather(module):
                hook = partial(meet, clean(name) or "the model")
                stack.enter_context(module.register_forward_pre_hook(hook, prepend=True))
        try:
            yield
        except BaseException as error:
            detector.depart(f"raised {type(error).__name__}: {error}")
            if isinstance(error, CollectiveMismatchError) and not failed:
                raise _UnmetError(str(error)) from error
            raise


def _detector() -> DesyncDetector:
    """The detector of this process's rank in its world, which each rank makes once."""
    world = _world()
    if world not in _detectors:
        store = dist.PrefixStore("fullshard.preflight", default_store())
        _detectors[world] = DesyncDetector(store, dist.get_rank(), dist.get_world_size())
    return _detectors[world]


def _may_gather(module: nn.Module) -> bool:
    """Whether a module's forward gathers in the order of the program: ours, or one of torch's."""
    state = state_of(module)
    if state is None:
        return callable(getattr(module, "unshard", None))
    return not isinstance(state.context.schedule, CanonicalOrder)


def _gathers(module: nn.Module) -> bool:
    """Whether the forward of a sharded module gathers now: not if full parameters were kept."""
    state = state_of(module)
    if state is None:
        return True
    kept = (
        group.state is ShardedState.UNSHARDED and not group.gathering.stale
        for group in state.own_groups
    )
    return not all(kept)
