"""How a group reduces: what users set, one reduction's set-up, and the ways to reduce.

[Note: reduce strategies] ``PlainReduce`` is the contract, and the identity: a reduce-scatter is the
whole reduction. ``AliasReduce`` uses the gradients of a world of one directly. ``TwoReductions``
follows a reduction over one axis of a mesh with another over the other axis: an all-reduce adds
replicas up (HSDP), or a reduce-scatter cuts again. The engine asks a strategy only whether a second
reduction follows, where torch's ``fully_shard`` passes flags and optional groups down one long
function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import (
    CommStreams,
    Layout,
    ReduceConfig,
    ReducedShards,
    ReduceInFlight,
    ReduceScaling,
    ReduceScatter,
    all_reduce_shards,
)
from fullshard.comm.spi import AllReduceInFlight, ReducePlan, SecondReduceInFlight, Stream
from fullshard.sharding.base.policies import declares
from fullshard.sharding.base.tensors import is_plain
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.protocols import Offload, WireForms

__all__ = [
    "AliasReduce",
    "InFlight",
    "PlainReduce",
    "ReadyReductions",
    "ReduceSettings",
    "ReductionSetup",
    "TwoReductions",
]

Gradients = list[torch.Tensor | None]
"""Per parameter of a reduction the full gradient; None where this rank has none.

A launch that packs the gradients empties the list, so that they are freed.
"""

InFlight = ReduceInFlight | AllReduceInFlight
"""A reduction in flight, whatever follows its reduce-scatter."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReduceSettings:
    """A user's settings for the reductions of a group.

    Attributes:
        comm: the collective; None: the default one.
        process_group: the ranks of the mesh's shard axis.
        divide_factor: what divides the sum, or a tensor that holds it then; None: the world size.
        force_sum: whether the backend is asked for sums only.
        inputs_in_flight: how many reductions travel at once, and so how many packed inputs.
        zero_unused: whether a parameter that no rank used gets zeros instead of no gradient.
        hook: called with each reduced buffer.
        hook_stream: to call it on; None: the all-reduce stream.
    """

    comm: ReduceScatter | None = None
    process_group: dist.ProcessGroup
    divide_factor: float | torch.Tensor | None = None
    force_sum: bool = False
    inputs_in_flight: int = 1  # as in torch: two took as long a step, and more memory
    zero_unused: bool = False
    hook: Callable[[torch.Tensor], None] | None = None
    hook_stream: Any = None


class PlainReduce:
    """A reduce-scatter is all there is, as each shard is held once; see [Note: reduce strategies].

    Attributes:
        gives_gradients: whether reductions give gradients now, or keep them for a later one.
        has_second_reduction: whether a second reduction follows the reduce-scatter.
    """

    gives_gradients = True
    has_second_reduction = False

    def launch(self, setup: ReductionSetup, gradients: Gradients) -> InFlight:
        """Launch a whole reduction of ``gradients``, and return what is in flight."""
        return setup.plan.launch(gradients)

    def result_stream(self, streams: CommStreams) -> Stream:
        """Return the stream of the last reduction."""
        return streams.reduce

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

    def end_backward(self) -> None:
        """Take notice that a backward ended well."""

    def abandon(self) -> None:
        """Drop all that is kept."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReductionSetup:
    """How a group, or several at once, reduce; made once, and kept while the settings stay.

    Attributes:
        names: of the groups, for events.
        rank: this rank, for events.
        indices: which of its group's parameters it carries.
        params: the parameters, in the order of the layout.
        layout: their positions, and the used-parameter mask behind them.
        config: what comm is given.
        wire: who knows in what form gradients travel.
        scaling: how it is scaled, what follows the reduce-scatter counted in.
        strategy: how it is launched, and what follows; see [Note: reduce strategies].
        settings: what the user set.
        second: a reduce-scatter over a second axis that follows the first.
    """

    names: tuple[str, ...]
    rank: int
    indices: tuple[int, ...]
    params: tuple[FSDPParam, ...]
    layout: Layout
    config: ReduceConfig
    wire: WireForms
    scaling: ReduceScaling
    strategy: PlainReduce
    settings: ReduceSettings
    second: ReducePlan | None = None

    @cached_property
    def plan(self) -> ReducePlan:
        """The plan of its reduce-scatter."""
        forms = [param.grad_sent for param in self.params]
        return self.wire.reduction(self.layout, forms, self.config)

    @cached_property
    def offloads(self) -> dict[int, Offload]:
        """The policies that bring gradients home, by id: a user's own need not be hashable."""
        policies = [param.offload for param in self.params]
        return {id(each): each for each in policies if not declares(each, "stages_out_nothing")}

    @cached_property
    def adds_in_backward(self) -> bool:
        """Whether results are added to earlier gradients as they arrive; see [Note: landing]."""
        return not self.offloads

    @cached_property
    def lands_at_once(self) -> bool:
        """Whether landing blocks no host: only copies to pinned memory leave the device."""
        pins = [declares(each, "pin_memory") for each in self.offloads.values()]
        return all(pins) and not self.config.streams.asynchronous_work

    @cached_property
    def lands_early(self) -> bool:
        """Whether a policy of them wants each gradient as soon as its reduction is over."""
        return any(declares(each, "lands_early") for each in self.offloads.values())


ReadyReductions = Sequence[tuple[ReductionSetup, Gradients]]
"""Reductions that are to be launched now, and the full gradients on their way into each."""


# -- a world of one -------------------------------------------------------------------------------


class AliasReduce(PlainReduce):
    """The gradient of autograd is used as the sharded gradient: one rank, no scaling.

    Gradients that are missing or need a cast are reduced by the collective.
    """

    def result_stream(self, streams: CommStreams) -> Stream:
        """Return the current stream: the gradients are of it."""
        return streams.current()

    def launch(self, setup: ReductionSetup, gradients: Gradients) -> InFlight:
        """Return the gradients if all can be used directly; otherwise reduce-scatter."""
        plan = setup.plan
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


class TwoReductions(PlainReduce):
    """A second reduction, over the other axis of a mesh, follows each reduce-scatter.

    While the second is off, partial results stay in the reduce dtype and in the layout of the first
    reduction, until a second one adds them.
    """

    has_second_reduction = True

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        """Start with the second reduction on, over ``process_group``."""
        self._process_group = process_group
        self._synchronises, self._waits_for_last = True, False
        self._partial: dict[_Key, torch.Tensor] = {}
        self._begun: list[tuple[_Key, ReduceInFlight]] = []  # partial ones, in this backward
        self._ended: list[tuple[_Key, ReduceInFlight]] = []  # in one whose end did not wait
        self._sent_any = False  # whether this backward sent a partial result

    def result_stream(self, streams: CommStreams) -> Stream:
        """Return the stream of the second reduction."""
        return streams.all_reduce

    @property
    def partial_params(self) -> Sequence[tuple[FSDPParam, ...]]:
        """The parameters of each partial result that waits for a second reduction."""
        keys = (*self._partial, *(key for key, _ in self._ended))
        return tuple(dict.fromkeys(params for params, _ in keys))

    @property
    def unsynced(self) -> bool:
        """Whether anything is kept, or was, until the present backward sent it."""
        return self._sent_any or bool(self.partial_params)

    def launch(self, setup: ReductionSetup, gradients: Gradients) -> InFlight:
        """Launch both reductions, or the first, whose result is kept for a later one."""
        plan = setup.plan
        streams = plan.config.streams
        for earlier_key, earlier in self._ended:
            self._add(earlier_key, earlier, streams)
        self._ended.clear()
        reduction = plan.launch(gradients)
        key = (setup.params, plan.layout.buffer.dtype)
        if not self.gives_gradients:
            blocks = streams.asynchronous_work
            if blocks or key not in self._partial:
                self._begun.append((key, reduction))
            else:
                self._add(key, reduction, streams)
            return reduction
        partial_sum = self._partial.pop(key, None)
        in_flight = self._follow(setup, reduction, partial_sum)
        if partial_sum is not None:
            self._sent_any = True
            added = streams.record(streams.all_reduce)
            streams.retire(partial_sum, streams.reduce, added, keep=1)
        return in_flight

    def _follow(
        self, setup: ReductionSetup, reduction: ReduceInFlight, partial_sum: torch.Tensor | None
    ) -> InFlight:
        """Return both: the first, and what adds replicas up or cuts its result again."""
        if setup.second is None:
            return all_reduce_shards(reduction, self._process_group, setup.scaling, partial_sum)
        second_of = partial(_to_second, setup.params)
        return SecondReduceInFlight(reduction, setup.second, second_of, partial_sum)

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

    def end_backward(self) -> None:
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


def _to_second(
    params: tuple[FSDPParam, ...], shards: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Return the shards of a first reduction as the full tensors of the second."""
    both = zip([param.sharding for param in params], shards, strict=True)
    return [
        sharding.second_cut.to_reduce(sharding.to_store(shard), shard.dtype)
        for sharding, shard in both
    ]
