"""The ways to reduce, chosen once.

[Note: reduce strategies] ``PlainReduce`` is the contract, and the identity: what a collective's
``ReducePlan`` launches is the whole reduction. ``AliasReduce`` uses the gradients of a world of one
directly. ``TwoReductions`` follows a reduction over one axis of a mesh with another over the other:
``over_replicas`` (HSDP) adds up, ``over_second_axis`` cuts again. The engine asks a strategy only
whether a second reduction follows the reduce-scatter, where torch's ``fully_shard`` passes flags
and optional groups down one long function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from fullshard.comm import (
    CommStreams,
    ReducedShards,
    ReduceInFlight,
    ReduceScaling,
    TensorSpec,
    all_reduce_shards,
    default_reduce_scatter,
)
from fullshard.comm.spi import (
    NOTHING,
    AllReduceInFlight,
    ReducePlan,
    SecondReduceInFlight,
    rank_major,
)
from fullshard.sharding.base.tensors import is_plain
from fullshard.sharding.params.param import FSDPParam

__all__ = [
    "AliasReduce",
    "Gradients",
    "InFlight",
    "Launch",
    "PlainReduce",
    "TwoReductions",
    "over_replicas",
    "over_second_axis",
]

Gradients = list[torch.Tensor | None]
"""Per parameter of a reduction the full gradient; None where this rank has none.

A launch that packs the gradients empties the list, so that they are freed.
"""

InFlight = ReduceInFlight | AllReduceInFlight
"""A reduction in flight, whatever follows its reduce-scatter."""

Launch = Callable[[Gradients], InFlight]
"""Launches a reduction of a list of gradients, and returns what is in flight."""


class PlainReduce:
    """A reduce-scatter is all there is, as each shard is held once; see [Note: reduce strategies].

    Attributes:
        gives_gradients: whether reductions give gradients now, or keep them for a later one.
        has_second_reduction: whether a second reduction follows the reduce-scatter.
    """

    gives_gradients = True
    has_second_reduction = False

    def launch_of(
        self,
        plan: ReducePlan,
        params: tuple[FSDPParam, ...],
        scaling: ReduceScaling,
    ) -> Launch:
        """Return the function that launches whole reductions.

        Args:
            plan: launches the reduce-scatter.
            params: the parameters whose gradients are reduced.
            scaling: of the whole reduction.
        """
        return plan.launch

    def at_result(self, streams: CommStreams) -> AbstractContextManager[object]:
        """Return a context in which the stream of the last reduction is current."""
        return streams.use(streams.reduce)

    @property
    def partial_params(self) -> Sequence[tuple[FSDPParam, ...]]:
        """The parameters of each partial result that waits for a later reduction."""
        return ()

    @property
    def unsynced(self) -> bool:
        """Whether anything is kept for a later reduction."""
        return bool(self.partial_params)

    @property
    def owes(self) -> bool:
        """Whether a later reduction must come, also if no backward reaches the group again."""
        return self.unsynced and self.gives_gradients

    def synchronise(self, enabled: bool) -> None:
        """Turn what follows the reduce-scatter on or off."""

    def wait_for_last(self, waits: bool) -> None:
        """Leave what follows the reduce-scatter to the last backward of a step, or do not."""

    def end_of_backward(self) -> None:
        """Take notice that a backward ended well."""

    def abandon(self) -> None:
        """Drop all that is kept."""


# -- a world of one -------------------------------------------------------------------------------


class AliasReduce(PlainReduce):
    """The gradient of autograd is used as the sharded gradient: one rank, no scaling.

    Gradients that are missing or need a cast are reduced by the collective.
    """

    def launch_of(
        self,
        plan: ReducePlan,
        params: tuple[FSDPParam, ...],
        scaling: ReduceScaling,
    ) -> Launch:
        """Return a function that launches nothing where gradients can be used directly."""
        return partial(self._launch, plan)

    def at_result(self, streams: CommStreams) -> AbstractContextManager[object]:
        """Return a context that changes nothing: the gradients are of the current stream."""
        return NOTHING

    def _launch(self, plan: ReducePlan, gradients: Gradients) -> InFlight:
        """Return the gradients if all can be used directly; otherwise reduce-scatter."""
        config, shards = plan.config, []
        for gradient, spec in zip(gradients, plan.layout.specs, strict=True):
            if (
                gradient is None
                or not is_plain(gradient)
                or gradient.dtype is not plan.layout.buffer.dtype
                or not gradient.is_contiguous()
                or gradient.device != config.device
            ):
                return plan.launch(gradients)
            shards.append(gradient.view(spec.laid_shape))
        gradients.clear()
        result = ReducedShards(shards=shards, mask=None, output=shards[0])
        return ReduceInFlight(plan, None, config.streams.record(), result=result)


# -- two reductions -------------------------------------------------------------------------------

_Key = tuple[tuple[FSDPParam, ...], torch.dtype]  # which parameters, in which dtype
_Follower = Callable[..., AllReduceInFlight]  # of a reduction, and ``partial=`` to add before
Follows = Callable[[ReducePlan, tuple[FSDPParam, ...], ReduceScaling], _Follower]
"""Returns the function that launches the second reduction after one of the plan, scaled."""


class TwoReductions(PlainReduce):
    """A second reduction, over the other axis of a mesh, follows each reduce-scatter.

    While the second is off, partial results stay in the reduce dtype and in the layout of the first
    reduction, until a second one adds them.
    """

    has_second_reduction = True

    def __init__(self, follows: Follows) -> None:
        """Start with the second reduction on. ``follows``: makes it, for each plan."""
        self._follows = follows
        self._synchronises, self._waits_for_last = True, False
        self._partial: dict[_Key, torch.Tensor] = {}
        self._begun: list[tuple[_Key, ReduceInFlight]] = []  # partial ones, in this backward
        self._ended: list[tuple[_Key, ReduceInFlight]] = []  # in one whose end did not wait
        self._sent_any = False  # whether this backward sent a partial result

    def at_result(self, streams: CommStreams) -> AbstractContextManager[object]:
        """Return a context in which the stream of the second reduction is current."""
        return streams.use(streams.all_reduce)

    @property
    def partial_params(self) -> Sequence[tuple[FSDPParam, ...]]:
        """The parameters of each partial result that waits for a second reduction."""
        keys = (*self._partial, *(key for key, _ in self._ended))
        return tuple(dict.fromkeys(params for params, _ in keys))

    @property
    def unsynced(self) -> bool:
        """Whether anything is kept, or was, until the present backward sent it."""
        return self._sent_any or bool(self.partial_params)

    def launch_of(
        self,
        plan: ReducePlan,
        params: tuple[FSDPParam, ...],
        scaling: ReduceScaling,
    ) -> Launch:
        """Return a function whose results are reduced again, or kept for a later reduction."""
        return partial(self._launch, plan, params, self._follows(plan, params, scaling))

    def _launch(
        self,
        plan: ReducePlan,
        params: tuple[FSDPParam, ...],
        follow: _Follower,
        gradients: Gradients,
    ) -> InFlight:
        """Return both reductions, or the first, which is kept for a later one."""
        streams = plan.config.streams
        for earlier_key, earlier in self._ended:
            self._add(earlier_key, earlier, streams)
        self._ended.clear()
        reduction = plan.launch(gradients)
        key = (params, plan.layout.buffer.dtype)
        if not self.gives_gradients:
            blocks = streams.asynchronous_work
            if blocks or key not in self._partial:
                self._begun.append((key, reduction))
            else:
                self._add(key, reduction, streams)
            return reduction
        partial_sum = self._partial.pop(key, None)
        in_flight = follow(reduction, partial=partial_sum)
        if partial_sum is not None:
            self._sent_any = True
            added = streams.record(streams.all_reduce)
            streams.retire(partial_sum, streams.reduce, added, keep=1)
        return in_flight

    def _add(self, key: _Key, reduction: ReduceInFlight, streams: CommStreams) -> None:
        """Add a result to the partial one, or make it that, on the stream of reductions."""
        with streams.use(streams.reduce):
            output = reduction.wait().output
            self._partial[key] = self._partial[key].add_(output) if key in self._partial else output

    def synchronise(self, enabled: bool) -> None:
        """Turn the second reduction on or off."""
        self._synchronises = enabled
        self.gives_gradients = enabled and not self._waits_for_last

    def wait_for_last(self, waits: bool) -> None:
        """Leave out the second in the present backward, which is not the last of a step."""
        self._waits_for_last = waits
        self.gives_gradients = self._synchronises and not waits

    def end_of_backward(self) -> None:
        """Drop gradients that a second reduction added, and keep the others."""
        self._ended += self._begun
        self._begun.clear()
        self._sent_any = False

    def abandon(self) -> None:
        """Drop all that is kept."""
        self._begun.clear()
        self._partial.clear()
        self._ended.clear()
        self._sent_any = False


def over_replicas(process_group: dist.ProcessGroup) -> Follows:
    """Return what follows where shards are replicated (HSDP): each is averaged over replicas."""

    def follows(
        plan: ReducePlan, params: tuple[FSDPParam, ...], scaling: ReduceScaling
    ) -> _Follower:
        return partial(all_reduce_shards, process_group=process_group, scaling=scaling)

    return follows


def over_second_axis(process_group: dist.ProcessGroup) -> Follows:
    """Return what follows where shards are cut again over ``process_group``: a reduce-scatter."""
    comm, ranks = default_reduce_scatter(process_group), process_group.size()

    def follows(
        plan: ReducePlan, params: tuple[FSDPParam, ...], scaling: ReduceScaling
    ) -> _Follower:
        dtype = plan.layout.buffer.dtype
        mask = TensorSpec(shape=(ranks, plan.layout.mask_numel), dtype=dtype, dim=0)
        specs = tuple([param.sharding.second_cut.spec_in(dtype) for param in params])
        config = replace(
            plan.config,
            comm=comm,
            process_group=process_group,
            scaling=replace(scaling, pre=1.0),
            name=f"{plan.config.name} (second level)",
        )
        second = ReducePlan(rank_major((*specs, mask), ranks, 0), config)
        return partial(SecondReduceInFlight, plan=second, second_of=partial(_to_second, params))

    return follows


def _to_second(
    params: tuple[FSDPParam, ...], shards: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the shards of a first reduction as the full tensors of the second."""
    both = zip([param.sharding for param in params], shards, strict=True)
    return [
        sharding.second_cut.to_reduce(sharding.to_store(shard), shard.dtype)
        for sharding, shard in both
    ]
