"""Reducing a list of gradients in one launch.

Owns: the order of pack, reduce-scatter and scaling, their streams, and the lifetime of their
tensors. ``ReduceInFlight`` holds everything that exists only while a reduction runs. Refuses:
knowing what the tensors are, deciding how they are scaled (see ``scaling``), and accumulating.
Invalid arguments raise before any collective is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import Buffer, allocate_from
from fullshard.comm.buffers.packing import pack_gradients
from fullshard.comm.collectives.lost_ranks import raise_located, wait_for
from fullshard.comm.layouts import checks, views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.runtime.compat import no_relation
from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.runtime.observer import CHECKS, LISTENERS
from fullshard.comm.runtime.ranges import NOTHING, is_profiled, named_range
from fullshard.comm.runtime.streams import StreamEvent
from fullshard.comm.transports.collective import EPOCH, Route, require_work
from fullshard.comm.transports.config import ReduceConfig
from fullshard.comm.transports.contribution import Contribution, PartsReducer

__all__ = ["ReduceInFlight", "ReducePlan", "ReducedShards", "foreach_reduce", "take_input"]


@dataclass(frozen=True, kw_only=True)
class ReducedShards:
    """The result of a reduction on this rank.

    Attributes:
        shards: this rank's shard of each reduced gradient, ``shard_shape(rank)``, in the reduce
            dtype; views of one buffer.
        mask: ``[layout.mask_numel]``, greater than 0 where any rank had a gradient; None if the
            layout has no used-parameter mask.
        output: the buffer.
    """

    shards: list[torch.Tensor]
    mask: torch.Tensor | None
    output: torch.Tensor


@dataclass(eq=False)
class ReduceInFlight:
    """A reduction that was issued. ``wait()`` gives its result.

    Attributes:
        plan: of which it is one.
        packed: the gradients that an asynchronous collective reads, kept until it is over; None
            after, or where they are not packed.
        output: this rank's slice of the result, set by ``allocate``: at the launch, or by a
            collective that calls it when the parts of all ranks are there.
        work: the handle of an asynchronous collective, or None.
        event: the end of the reduction on its stream.
        result: what ``wait()`` gives, once it is known.
    """

    plan: ReducePlan
    packed: Buffer | None
    event: StreamEvent
    output: torch.Tensor = field(init=False)
    work: dist.Work | None = None
    result: ReducedShards | None = field(default=None, repr=False)

    def allocate(self) -> torch.Tensor:
        """Memory for this rank's slice of the result, asked for once."""
        config, spec = self.plan.config, self.plan.layout.buffer
        self.output = allocate_from(
            config.collective, spec.slice_numel, dtype=spec.dtype, device=config.device
        )
        return self.output

    def wait(self) -> ReducedShards:
        """The reduced shards, usable on the current stream; later calls give the same.

        Without streams it blocks until they are there.
        """
        if self.result is None:
            if self.work is not None:
                wait_for(self.plan.config, self.work)
                self.work = None
                self._finish()
            self.result = self.plan.shards_in(self.output)
        self.plan.config.streams.current().wait_event(self.event)
        return self.result

    def launch_second(self) -> None:
        """Wait for it; no collective follows, as one does in ``AllReduceInFlight``."""
        self.wait()

    def discard(self) -> None:
        """Wait for it, too: other ranks read the input of this rank."""
        self.wait()

    def launched(self, work: dist.Work | None) -> None:
        """Take the handle of its collective; None: it is over."""
        config = self.plan.config
        if work is not None and not config.streams.asynchronous_work:
            work.wait()  # makes the reduce stream wait, not the host
        elif work is not None:
            # a user's handle may have wait() alone
            over = self.plan.on_device and isinstance(work, dist.Work) and work.is_completed()
            if not over:
                self.work = work
                return
            wait_for(config, work)  # now, so that the next backward has the memory of the input
        self._finish()

    def _finish(self) -> None:
        """Scale what a collective that is over has given, and let its input go."""
        plan, config, streams = self.plan, self.plan.config, self.plan.config.streams
        if config.scaling.scales_after:
            self.output[: plan.mask.start].mul_(config.scaling.post)
        self.event = streams.record()
        packed, self.packed = self.packed, None
        if packed is not None:
            keep = config.inputs_in_flight - 1  # they travel while one packs
            config.source.release(packed, streams, streams.inputs, self.event, keep=keep)


def take_input(config: ReduceConfig, layout: Layout, rank: int) -> Buffer:
    """Return a buffer in which the current stream may pack what a reduction reads.

    The stream of inputs waits for the reductions that used the memory before.
    """
    streams = config.streams
    with streams.use(streams.inputs):
        packed = config.source.take(config.collective, layout, rank, config.device)
    streams.current().wait_event(streams.record(streams.inputs))
    return packed


class ReducePlan:
    """Reductions of gradients of one layout, by one config: checked once, launched again and again.

    Attributes:
        layout: positions in the result.
        sent: positions in the input.
        config: collective, ranks, streams, scaling.
        on_device: whether inputs are in memory of a device that queues its work.
        mask: where the used-parameter mask is in a slice; the tensors are before it.
    """

    def __init__(self, layout: Layout, config: ReduceConfig) -> None:
        """Take both; see ``foreach_reduce``.

        Raises:
            ValueError: if the layout cannot be reduced, or does not fit the process group.
        """
        self.layout = self.sent = layout
        self.config = config
        self.on_device = traits_of(config.device).queued
        self._rank = checks.check_world(layout, config.process_group, config.name)
        checks.check_reducible(layout, config.name)
        self._route: Route | None = None
        self._plan = views.shard_plan(layout, self._rank)
        behind = layout.mask_offset // layout.buffer.dtype.itemsize
        self.mask = slice(behind, behind + layout.mask_numel)

    @torch.no_grad()
    def launch(self, gradients: list[torch.Tensor | None]) -> ReduceInFlight:
        """Launch the reduction of gradients that fit the layout, and return it in flight.

        Ranks that share memory write the parts of other ranks there, and add their own part from
        the gradients. Otherwise gradients are packed, and the list is emptied before there is
        memory for the result. See ``foreach_reduce``.
        """
        layout, config, streams = self.sent, self.config, self.config.streams
        with named_range("post_backward_reduce", config.name) if is_profiled() else NOTHING:
            group, op = config.process_group, config.scaling.op
            if CHECKS:
                scaling = config.scaling
                checks.check_launch(config.kind, config.name, layout, group, scaling, gradients)
            route = self._route
            if route is None or route.epoch != EPOCH[0]:
                route = self._route = self._find_route()
            if route.parts is not None and layout.buffer.slice_numel:
                in_parts = self._launch_parts(gradients, route.parts)
                if in_parts is not None:
                    return in_parts
            packed = take_input(config, layout, self._rank)
            self._pack(packed, gradients, config.scaling)
            gradients.clear()
            if LISTENERS:
                config.emit_launch(packed.tensor.nbytes, packed.tensor.nbytes)
            flight = ReduceInFlight(self, packed, streams.record())
            given, work = packed.tensor, None
            with streams.use(streams.reduce):
                streams.reduce.wait_event(flight.event)
                output = flight.allocate()
                try:
                    if given.numel():  # equal on all ranks: none waits for an empty collective
                        async_op = streams.asynchronous_work
                        work = route.launch(output, given, group, op, async_op)
                except RuntimeError as error:
                    raise_located(error, config.what, config.name, group)
                flight.launched(work)
            return flight

    _pack: ClassVar[Callable[..., None]] = staticmethod(pack_gradients)  # no frame of ours
    """Fill the input with gradients, which the scaling's ``pre`` multiplies."""

    def _find_route(self) -> Route:
        """Return the functions that reduce."""
        config = self.config
        group, device, op = config.process_group, config.device, config.scaling.op
        return config.collective.reduce_route(group, device, op)

    def _launch_parts(
        self, gradients: Sequence[torch.Tensor | None], reducer: PartsReducer
    ) -> ReduceInFlight | None:
        """Return the reduction in flight of unpacked gradients; None, on all ranks, if no room."""
        layout, config = self.layout, self.config
        given = Contribution(gradients, layout, self._rank, config.scaling)
        flight = ReduceInFlight(self, None, config.streams.record(config.streams.reduce))
        group, op = config.process_group, config.scaling.op
        try:
            flight.work = reducer.reduce_parts(flight.allocate, given, group, op)
        except RuntimeError as error:
            raise_located(error, config.what, config.name, group)
        if flight.work is None:
            return None
        if not isinstance(flight.work, dist.Work):
            require_work(reducer, flight.work)
        if LISTENERS:
            nbytes = layout.buffer.slice_nbytes * layout.world_size
            config.emit_launch(nbytes, nbytes)
        return flight

    def shards_in(self, output: torch.Tensor) -> ReducedShards:
        """Return this rank's shards from its slice of the result, ``[slice_numel]``."""
        start = int(output.storage_offset())
        with no_relation():  # each is to be a gradient by itself
            shards = [output.as_strided(at.size, at.stride, start + at.offset) for at in self._plan]
        return ReducedShards(
            shards=shards,
            mask=output[self.mask] if self.layout.mask_numel else None,
            output=output,
        )


def foreach_reduce(
    gradients: Sequence[torch.Tensor | None],
    layout: Layout,
    config: ReduceConfig,
) -> ReduceInFlight:
    """A reduction in flight, after which each rank holds its shard of every reduced gradient.

    The input is packed on the current stream, so gradients may be freed when this returns; the
    collective and the scaling after it run on the reduce stream, or asynchronously where there are
    no streams. A collective that has a ``parts_reducer`` packs nothing, and reads each gradient
    from its own memory: do not write to the gradients until the reduction is over. The default
    collective does that between CPU ranks of one host. To repeat a reduction, use a ``ReducePlan``,
    which checks the arguments once.

    Args:
        gradients: the full gradient of each tensor, ``layout.specs[i].shape``, any dtype, or None
            for an extent of zeros.
        layout: where things lie: one buffer of one floating-point dtype, in which the reduction
            happens. Element ``i`` of the mask shows whether any rank had gradient ``i``, if
            ``layout.mask_numel == len(gradients)``.
        config: collective, ranks, streams, scaling.

    Raises:
        ValueError: if gradients do not fit the layout or the device, or the layout does not fit the
            process group.
        CollectiveMismatchError: in debug mode, if the ranks did not come to the same collective.
    """
    plan = ReducePlan(layout, config)
    checks.check_gradients(gradients, layout, config.device, config.name)
    return plan.launch(list(gradients))
