"""The ways to reduce that are more than one reduce-scatter, one class each, chosen once.

[Note: reduce strategies] ``PlainReduce`` is the contract: given how to reduce and the gradients,
launch, and return what is in flight. ``AliasReduce`` takes the gradients of a world of one as they
lie. ``HybridReduce`` goes on over replicas (HSDP). ``HookedReduce`` wraps another, and ends it with
a user's function. The engine never asks which one it has, where torch's ``fully_shard`` passes
flags and optional groups down one long function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import (
    ReducedShards,
    ReduceInFlight,
    ReduceScaling,
    all_reduce_shards,
    foreach_reduce,
)
from fullshard.comm.collectives.replicas import ReplicaConfig
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.reduce.reduction import (
    Gradients,
    InFlight,
    PlainReduce,
    ReductionSetup,
)

__all__ = ["AliasReduce", "HookedReduce", "HybridReduce"]

# -- a world of one -------------------------------------------------------------------------------


class AliasReduce(PlainReduce):
    """In a world of one that scales by one, the sharded gradient is the tensor autograd made.

    What would have to be cast, or added to zeros, or is part of a graph, is reduced as elsewhere.
    """

    def launch(self, setup: ReductionSetup, gradients: Gradients) -> InFlight:
        """Returns the gradients, if all can be used as they lie; else the reduce-scatter."""
        dtype, shards = setup.layout.buffers[0].dtype, []
        for gradient, spec in zip(gradients, setup.layout.specs, strict=True):
            if (
                type(gradient) is not torch.Tensor
                or gradient.dtype is not dtype
                or gradient.requires_grad
                or not gradient.is_contiguous()
                or gradient.device != setup.config.device
            ):
                return foreach_reduce(gradients, setup.layout, setup.config)
            shards.append(gradient.view(spec.laid_shape))
        return _Finished(ReducedShards(shards=shards, marks=None, output=shards[0]))


@dataclass(frozen=True)
class _Finished:
    """A reduction that was over before it began."""

    result: ReducedShards
    ready = True

    def advance(self) -> None:
        """Nothing follows."""

    def land(self) -> None:
        """There is nothing to wait for."""

    def wait(self) -> ReducedShards:
        return self.result


# -- replicas -------------------------------------------------------------------------------------

_Key = tuple[tuple[FSDPParam, ...], torch.dtype]  # which parameters, in which dtype


class _Partial:
    """A reduction that stops before the all-reduce: waiting for it stores it."""

    def __init__(
        self, reduction: ReduceInFlight, partial: dict[_Key, torch.Tensor], key: _Key
    ) -> None:
        self._reduction = reduction
        self._partial = partial
        self._key = key
        self.done = False

    @property
    def ready(self) -> bool:
        return self._reduction.ready

    def advance(self) -> None:
        """Nothing follows."""

    def land(self) -> None:
        self._reduction.wait()

    def wait(self) -> ReducedShards:
        result = self._reduction.wait()
        if not self.done:
            self.done = True
            earlier = self._partial.get(self._key)
            output = result.output
            self._partial[self._key] = output if earlier is None else earlier.add_(output)
        return result


class HybridReduce(PlainReduce):
    """Shards are replicated (HSDP): each reduced shard is averaged over its replicas.

    Without synchronisation, partial results stay in the reduce dtype and in the layout of their
    reduction, until one with it adds them.
    """

    goes_on = True

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Starts with the all-reduce on."""
        self._process_group = process_group
        self.complete = True
        self._partial: dict[_Key, torch.Tensor] = {}
        self._unfinished: list[_Partial] = []
        self._sent: list[_Key] = []

    def before(self, scaling: ReduceScaling) -> ReduceScaling:
        """Returns ``scaling`` without what comes last."""
        return replace(scaling, post=1.0)

    @property
    def unsynced(self) -> bool:
        """Whether partial results wait for an all-reduce."""
        return bool(self._partial)

    def launch(self, setup: ReductionSetup, gradients: Gradients) -> InFlight:
        """Returns the reduction with its all-reduce, or one that is kept for a later one."""
        reduction = foreach_reduce(gradients, setup.layout, setup.config)
        key: _Key = (setup.params, setup.layout.buffers[0].dtype)
        if not self.complete:
            kept = _Partial(reduction, self._partial, key)
            self._unfinished.append(kept)
            return kept
        for kept in self._unfinished:  # launched in a backward whose end did not wait
            kept.wait()
        self._unfinished.clear()
        config = ReplicaConfig(
            process_group=self._process_group,
            streams=setup.config.streams,
            scaling=setup.scaling,
            name=setup.config.name,
        )
        # a backward may reduce twice; see [Note: one reduction]
        partial = None if key in self._sent else self._partial.get(key)
        self._sent.append(key)
        return all_reduce_shards(reduction, config, partial)

    def synchronise(self, enabled: bool) -> None:
        """Turns the all-reduce on or off."""
        self.complete = enabled

    def end_of_backward(self) -> None:
        """Drops what travelled in an all-reduce, and what is stored already."""
        self._unfinished = [kept for kept in self._unfinished if not kept.done]
        for key in self._sent:
            self._partial.pop(key, None)
        self._sent.clear()

    def abandon(self, *, keep: bool) -> None:
        """Drops what a backward that did not end kept; all if not ``keep``."""
        for kept in self._unfinished:
            kept.done = True  # it is never stored
        self._unfinished.clear()
        self._sent.clear()
        if not keep:
            self._partial.clear()


# -- a user's function at the end -----------------------------------------------------------------


class HookedReduce(PlainReduce):
    """A reduction that ends with a user's function of the reduced buffer."""

    def __init__(
        self, inner: PlainReduce, hook: Callable[[torch.Tensor], None], stream: Any
    ) -> None:
        """Wraps ``inner``. ``stream``: to call the function on; None: the all-reduce stream."""
        self._inner = inner
        self._hook = hook
        self._stream = stream

    @property
    def complete(self) -> bool:  # type: ignore[override]  # follows the wrapped one
        """As the wrapped one's."""
        return self._inner.complete

    def launch(self, setup: ReductionSetup, gradients: Gradients) -> InFlight:
        """Returns the wrapped reduction, ending with the call if it gives gradients."""
        in_flight = self._inner.launch(setup, gradients)
        return _Hooked(in_flight, self._call, setup) if self._inner.complete else in_flight

    def _call(self, setup: ReductionSetup, output: torch.Tensor) -> None:
        streams = setup.config.streams
        stream = streams.all_reduce if self._stream is None else self._stream
        stream.wait_event(streams.record())
        with streams.use(stream):
            self._hook(output)
            done = streams.record(stream)
        streams.current().wait_event(done)


class _Hooked:
    """A reduction that ends with a call, made when it is first waited for."""

    def __init__(
        self,
        in_flight: InFlight,
        call: Callable[[ReductionSetup, torch.Tensor], None],
        setup: ReductionSetup,
    ) -> None:
        self._in_flight = in_flight
        self._call = call
        self._setup = setup
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
            self._call(self._setup, result.output)
        return result
