"""Replication of shards: whether a reduction goes on over replicas, and what waits for that.

Owns the answer for a mesh without replicas, which is to do nothing, and for a hybrid mesh. Partial
results stay in the reduce dtype and in the layout of their reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullshard.comm import (
    ReducedShards,
    ReduceInFlight,
    ReduceScaling,
    ReplicaLane,
    all_reduce_shards,
)
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo, HSDPMeshInfo
from fullshard.sharding.params.plan import ReductionPlan
from fullshard.sharding.reduce.reduction import InFlight, SharedComm

__all__ = [
    "BufferHook",
    "HybridReplicas",
    "Launched",
    "NoReplicas",
    "Replication",
    "no_hook",
    "replication_of",
]


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A reduce-scatter that was launched.

    Attributes:
        reduction: what comm returned.
        plan: what it carries.
        scaling: of the whole reduction.
        shared: streams and queue.
        name: the group's name.
    """

    reduction: ReduceInFlight
    plan: ReductionPlan
    scaling: ReduceScaling
    shared: SharedComm
    name: str


def no_hook(in_flight: InFlight, launched: Launched) -> InFlight:
    """Returns ``in_flight``."""
    return in_flight


class BufferHook:
    """Calls a user's function with each reduced buffer."""

    def __init__(self, hook: Callable[[torch.Tensor], None], stream: Any) -> None:
        """Takes the function, and the stream to call it on; None: the all-reduce stream."""
        self._hook = hook
        self._stream = stream

    def __call__(self, in_flight: InFlight, launched: Launched) -> InFlight:
        """Returns the reduction, which ends with the call."""
        return _Hooked(in_flight, launched, self._hook, self._stream)


class _Hooked:
    """A reduction that ends with a user's function, called when it is first waited for."""

    def __init__(
        self,
        in_flight: InFlight,
        launched: Launched,
        hook: Callable[[torch.Tensor], None],
        stream: Any,
    ) -> None:
        self._in_flight = in_flight
        self._launched = launched
        self._hook = hook
        self._stream = stream
        self._called = False

    @property
    def ready(self) -> bool:
        return self._in_flight.ready

    def advance(self) -> None:
        self._in_flight.advance()

    def land(self) -> None:
        self._in_flight.land()

    @torch.no_grad()
    def wait(self) -> ReducedShards:
        result = self._in_flight.wait()
        if not self._called:
            self._called = True
            streams = self._launched.shared.streams
            stream = streams.all_reduce if self._stream is None else self._stream
            stream.wait_event(streams.record())
            with streams.use(stream):
                self._hook(self._launched.reduction.output)
                done = streams.record(stream)
            streams.current().wait_event(done)
        return result


class Replication(Protocol):
    """What follows a reduce-scatter?"""

    def before(self, scaling: ReduceScaling) -> ReduceScaling:
        """Returns the scaling of the reduce-scatter itself."""
        ...

    @property
    def follows(self) -> bool:
        """Whether anything does."""
        ...

    def follow(self, launched: Launched) -> InFlight:
        """Returns the whole reduction, in flight."""
        ...

    @property
    def complete(self) -> bool:
        """Whether reductions give gradients; else they are kept for a later one."""
        ...

    def synchronise(self, enabled: bool) -> None:
        """Turns the all-reduce on or off."""
        ...

    @property
    def unsynced(self) -> bool:
        """Whether something is kept for a later reduction."""
        ...

    def end_of_backward(self) -> None:
        """Takes notice that a backward ended well."""
        ...

    def abandon(self, *, keep: bool) -> None:
        """Drops what a backward that did not end kept; all if not ``keep``."""
        ...


class NoReplicas:
    """Each shard is held once: a reduce-scatter is all there is."""

    def before(self, scaling: ReduceScaling) -> ReduceScaling:
        """Returns ``scaling``."""
        return scaling

    @property
    def follows(self) -> bool:
        """Returns False."""
        return False

    def follow(self, launched: Launched) -> InFlight:
        """Returns the reduce-scatter."""
        return launched.reduction

    @property
    def complete(self) -> bool:
        """True."""
        return True

    def synchronise(self, enabled: bool) -> None:
        """There is nothing to turn off."""

    @property
    def unsynced(self) -> bool:
        """False."""
        return False

    def end_of_backward(self) -> None:
        """Nothing is kept."""

    def abandon(self, *, keep: bool) -> None:
        """Nothing is kept."""


_Key = tuple[Sequence[int], torch.dtype]  # which parameters, in which dtype


class _Kept:
    """A reduction that stops before the all-reduce: waiting for it stores it."""

    def __init__(
        self, reduction: ReduceInFlight, keep: dict[_Key, torch.Tensor], key: _Key
    ) -> None:
        self._reduction = reduction
        self._keep = keep
        self._key = key
        self.done = False

    @property
    def ready(self) -> bool:
        return self._reduction.ready

    def advance(self) -> None:
        """Nothing follows."""

    def drop(self) -> None:
        """Never stores it, if it is not stored yet."""
        self.done = True

    def land(self) -> None:
        self._reduction.wait()

    def wait(self) -> ReducedShards:
        result = self._reduction.wait()
        if not self.done:
            self.done = True
            earlier = self._keep.get(self._key)
            output = self._reduction.output
            self._keep[self._key] = output if earlier is None else earlier.add_(output)
        return result


class HybridReplicas:
    """Shards are replicated: each reduced shard is averaged over its replicas."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Starts with the all-reduce on."""
        self._process_group = process_group
        self._enabled = True
        self._partial: dict[_Key, torch.Tensor] = {}
        self._unfinished: list[_Kept] = []
        self._sent: list[_Key] = []

    def before(self, scaling: ReduceScaling) -> ReduceScaling:
        """Returns ``scaling`` without what comes last."""
        return replace(scaling, post=1.0)

    @property
    def follows(self) -> bool:
        """Returns True."""
        return True

    def follow(self, launched: Launched) -> InFlight:
        """Returns the reduction with its all-reduce, or one that is kept for a later one."""
        key: _Key = (launched.plan.indices, launched.plan.dtype)
        if not self._enabled:
            kept = _Kept(launched.reduction, self._partial, key)
            self._unfinished.append(kept)
            return kept
        for kept in self._unfinished:  # launched in a backward whose end did not wait
            kept.wait()
        self._unfinished.clear()
        lane = ReplicaLane(
            process_group=self._process_group,
            streams=launched.shared.streams,
            scaling=launched.scaling,
            name=launched.name,
        )
        # a backward may reduce twice; see [Note: one reduction]
        partial = None if key in self._sent else self._partial.get(key)
        self._sent.append(key)
        return all_reduce_shards(launched.reduction, lane, partial)

    @property
    def complete(self) -> bool:
        """Whether the all-reduce is on."""
        return self._enabled

    def synchronise(self, enabled: bool) -> None:
        """Turns the all-reduce on or off."""
        self._enabled = enabled

    @property
    def unsynced(self) -> bool:
        """Whether partial results wait for an all-reduce."""
        return bool(self._partial)

    def end_of_backward(self) -> None:
        """Drops what travelled in an all-reduce, and what is stored already."""
        self._unfinished = [kept for kept in self._unfinished if not kept.done]
        for key in self._sent:
            self._partial.pop(key, None)
        self._sent.clear()

    def abandon(self, *, keep: bool) -> None:
        """Drops what a backward that did not end kept; all if not ``keep``."""
        for kept in self._unfinished:
            kept.drop()
        self._unfinished.clear()
        self._sent.clear()
        if not keep:
            self._partial.clear()


def replication_of(mesh_info: FSDPMeshInfo) -> Replication:
    """Returns what follows a reduce-scatter on this mesh."""
    if isinstance(mesh_info, HSDPMeshInfo):
        return HybridReplicas(mesh_info.replicate_process_group)
    return NoReplicas()
