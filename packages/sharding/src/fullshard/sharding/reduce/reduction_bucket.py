"""Reductions of small groups that end their backwards one after another, in one launch.

Owns the gradients that wait for those of the bucket's other groups. It launches when all are there,
when one more would not fit, and when it is told to at the end of backward. All ranks see groups
reduce in the same order, so they launch alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fullshard.comm import (
    Layout,
    ReduceLane,
    ReduceScaling,
    foreach_reduce,
    joining_pays,
    lanes_join,
)
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.plan import ReductionPlan, rank_major
from fullshard.sharding.reduce.reduction import PendingReduction, ReductionQueue

__all__ = ["GroupReduction", "ReductionBucket", "ReductionSetup"]


_MOST_JOINTS = 16  # that are kept; who changes settings at each step needs none of the last


@dataclass(frozen=True, kw_only=True, eq=False)
class ReductionSetup:
    """How a group reduces by one plan, which stays while its settings do.

    Attributes:
        name: the group's name.
        plan: what it carries.
        params: the parameters.
        lane: what it would be launched with by itself.
        scaling: how it is scaled, what follows it counted in.
        nbytes: bytes that it moves, the slices of all ranks counted.
    """

    name: str
    plan: ReductionPlan
    params: Sequence[FSDPParam]
    lane: ReduceLane
    scaling: ReduceScaling
    nbytes: int


@dataclass(frozen=True)
class GroupReduction:
    """One reduction of one group, which was not launched yet.

    Attributes:
        setup: how.
        gradients: per parameter the full gradient; None where this rank has none.
        launch: launches it by itself.
    """

    setup: ReductionSetup
    gradients: Sequence[torch.Tensor | None]
    launch: Callable[[GroupReduction], None]


@dataclass(frozen=True)
class _Joint:
    """How some reductions are launched together; kept while their set-ups stay.

    Attributes:
        layout: of all, in their order.
        lane: as any of them has.
        params: the parameters of all.
    """

    layout: Layout
    lane: ReduceLane
    params: tuple[FSDPParam, ...]

    @classmethod
    def of(cls, waiting: Sequence[ReductionSetup]) -> _Joint | None:
        """Returns how to launch all of ``waiting``; None if that is not possible."""
        first = waiting[0]
        for each in waiting:
            if each.plan.dtype is not first.plan.dtype or not lanes_join(each.lane, first.lane):
                return None
            if not joining_pays(each.plan.layout, each.lane):
                return None
        specs = tuple(spec for each in waiting for spec in each.plan.layout.specs)
        return cls(
            layout=rank_major(specs, first.plan.layout.world_size, len(specs)),
            lane=replace(first.lane, name=f"{waiting[-1].name} to {first.name}"),
            params=tuple(param for each in waiting for param in each.params),
        )


class ReductionBucket:
    """The reductions of small groups that are gathered one after another."""

    def __init__(self, size: int, queue: ReductionQueue, rank: int) -> None:
        """Waits for ``size`` reductions; launches them into ``queue``."""
        self._size = size
        self._queue = queue
        self._rank = rank
        self._waiting: dict[FSDPParam, GroupReduction] = {}  # by the first parameter of each
        self._nbytes = 0
        self._joints: dict[tuple[ReductionSetup, ...], _Joint | None] = {}

    def put(self, reduction: GroupReduction, cap_mb: float) -> None:
        """Takes a reduction. At most ``cap_mb`` MiB travel together."""
        setup = reduction.setup
        first = setup.params[0]
        if first in self._waiting or self._nbytes + setup.nbytes > cap_mb * 2**20:
            self.flush()
        self._waiting[first] = reduction
        self._nbytes += setup.nbytes
        if len(self._waiting) == self._size:
            self.flush()

    def flush(self) -> None:
        """Launches what waits."""
        waiting, self._waiting, self._nbytes = list(self._waiting.values()), {}, 0
        joint = self._joint(waiting) if len(waiting) > 1 else None
        if joint is not None:
            self._launch(waiting, joint)
            return
        for reduction in waiting:
            self._queue.make_room(reduction.setup.lane.inputs_in_flight)
            reduction.launch(reduction)

    def abandon(self) -> None:
        """Forgets what waits: its backward raised."""
        self._waiting, self._nbytes = {}, 0

    def forget(self) -> None:
        """Forgets how reductions were launched together: parameters were replaced."""
        self._joints.clear()

    def _joint(self, waiting: Sequence[GroupReduction]) -> _Joint | None:
        setups = tuple([each.setup for each in waiting])
        if setups not in self._joints:
            if len(self._joints) >= _MOST_JOINTS:
                self._joints.clear()
            self._joints[setups] = _Joint.of(setups)
        return self._joints[setups]

    def _launch(self, waiting: Sequence[GroupReduction], joint: _Joint) -> None:
        layout, lane = joint.layout, joint.lane
        gradients = [gradient for each in waiting for gradient in each.gradients]
        self._queue.make_room(lane.inputs_in_flight)
        in_flight = foreach_reduce(gradients, layout, lane)
        self._queue.push(
            PendingReduction(
                names=tuple([each.setup.name for each in waiting]),
                rank=self._rank,
                params=joint.params,
                in_flight=in_flight,
                complete=True,
                lacks_gradient=any(gradient is None for gradient in gradients),
            )
        )
