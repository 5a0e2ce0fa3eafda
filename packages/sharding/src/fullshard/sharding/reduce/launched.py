"""A reduction of a group, from its launch until its sharded gradients are in place.

Owns what one launched reduction still has to do. ``ReductionQueue`` decides when.

[Note: landing] A result lands when it is launched, if the host waits for nothing then, and else
before the next launch: the user's function is called, and shards are cast to the stored dtype,
copied where parameters live, and added to gradients of earlier backwards. All of that runs on the
stream of the reduction, so no computation waits for it, and the memory of the result is free for
the next reduction. Torch's ``fully_shard`` does the same. A gradient without an earlier one becomes
``.grad`` at the end of the backward: a backward that raises leaves no new gradient. Gradients that
were added stay. With an offload, all is added at the end.

[Note: whose gradients] What a reduction gives becomes ``.grad`` and belongs to the user from then
on: no later reduction fills that memory again, and ``zero_grad(set_to_none=True)`` frees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, islice, repeat
from typing import Any

import torch
from torch import nn

from fullshard.comm import ReducedShards
from fullshard.comm.spi import StreamEvent
from fullshard.sharding.base.compat import (
    gradients_of,
    hooks_after_accumulation,
    local_shard,
    make_dtensor,
    without_torch_function,
)
from fullshard.sharding.params.lost_data import NotedStorage
from fullshard.sharding.reduce.strategies import InFlight, ReductionSetup

__all__ = ["LaunchedReduction"]


@dataclass(eq=False, kw_only=True, slots=True)
class LaunchedReduction:
    """A reduction that was launched.

    Attributes:
        setup: what it carries.
        in_flight: the reduce-scatter, with what follows it; None: its result has landed.
        gives_gradients: whether it gives gradients; else they are kept for a later one.
        used_here: whether this rank had a gradient for each, if it lacked one, so that the
            used-parameter mask has to be read.
        calls_hook: whether the user's function of the reduced buffer is still to be called.
        mask: whether any rank had a gradient for each, where ``used_here`` is set.
        landed: per parameter the gradient, or what is to be added to it; None: it was added.
        event: the end of the landing on its stream.
    """

    setup: ReductionSetup
    in_flight: InFlight | None
    gives_gradients: bool
    used_here: Sequence[bool] | None
    calls_hook: bool
    mask: torch.Tensor | None = None
    landed: list[torch.Tensor | None] = field(default_factory=list)
    event: StreamEvent | None = None

    def make_room(self) -> None:
        """End it as far as the next reduction needs; see [Note: landing]."""
        follows_later = (
            self.setup.strategy.has_second_reduction
            and self.setup.config.streams.asynchronous_work
            and not self.setup.lands_early
        )
        if not follows_later:
            self.land()
        elif self.in_flight is not None:
            self.in_flight.launch_second()  # the host would wait for the second reduction

    def land(self) -> None:
        """Bring the result where it belongs, and free its memory, unless that was done.

        Without streams the host waits for the result. A call that was interrupted is continued.
        """
        if self.in_flight is None:
            return
        strategy, streams = self.setup.strategy, self.setup.config.streams
        with streams.use(strategy.result_stream(streams)):
            result = self.in_flight.wait()
            if self.calls_hook:
                self.calls_hook = False
                _call_hook(self.setup, result.output)
            if self.gives_gradients:
                self._land_shards(result)
            self.event = streams.record()
        if self.gives_gradients and strategy.has_second_reduction:
            streams.retire(result.output, streams.reduce, self.event, keep=1)
        self.in_flight = None

    def _land_shards(self, result: ReducedShards) -> None:
        if self.used_here is not None:
            assert result.mask is not None, "every reduction of a group carries the mask"
            self.mask = result.mask > 0
        params, landed = self.setup.params, self.landed
        adds = self.setup.adds_in_backward
        earlier = gradients_of([param.sharded for param in params]) if adds else repeat(None)
        given = zip(params, result.shards, earlier, strict=False)
        for param, shard, present in islice(given, len(landed), None):
            if shard.dtype is not param.lands_in:
                shard = param.stage_gradient(shard)
            if present is not None:
                with without_torch_function():
                    local_shard(present).add_(shard)
            landed.append(shard if present is None else None)

    def commit(self, used: Sequence[bool] | None) -> list[nn.Parameter]:
        """Make what landed the gradients of the ``used`` parameters, or add it; None: of all.

        Returns the parameters with hooks to call after accumulation.
        """
        hooked_params, landed, self.landed = list[nn.Parameter](), self.landed, []
        if not self.gives_gradients:
            return hooked_params
        given = zip(self.setup.params, landed, strict=True)
        with without_torch_function():
            for param, gradient in given if used is None else compress(given, used):
                sharded = param.sharded
                present = sharded.grad
                if gradient is not None and gradient.dtype is not sharded.dtype:
                    gradient = gradient.to(sharded.dtype)  # the parameter changed since it landed
                if gradient is None:
                    pass
                elif present is None:
                    made: Any = make_dtensor(gradient, param.spec)
                    made.noted_storage = NotedStorage((made.untyped_storage(),))
                    sharded.grad = made
                else:
                    param.offload.accumulate(local_shard(present), gradient)
                if hooks_after_accumulation(sharded):
                    hooked_params.append(sharded)
        return hooked_params

    def wait(self) -> None:
        """Make the current stream wait for the landing."""
        assert self.event is not None, "it has landed"
        self.setup.config.streams.current().wait_event(self.event)

    def discard(self) -> None:
        """Wait for it and drop the result; what it added stays."""
        if self.in_flight is None:
            self.wait()
        else:
            self.in_flight.discard()


@torch.no_grad()
def _call_hook(setup: ReductionSetup, output: torch.Tensor) -> None:
    """Call the user's function of a reduced buffer, on its stream."""
    settings, streams = setup.settings, setup.config.streams
    assert settings.hook is not None, "there is one"
    stream = streams.all_reduce if settings.hook_stream is None else settings.hook_stream
    stream.wait_event(streams.record())
    with streams.use(stream):
        settings.hook(output)
        done = streams.record(stream)
    streams.current().wait_event(done)
