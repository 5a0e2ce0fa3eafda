"""The gradients of a group: collected from autograd, accumulated, reduced.

Owns what is set per group about reduction (synchronisation on or off, divide factor, the
collective) and where the group stands in the present backward. [Note: one reduction] A group
reduces at a moment that all ranks share, when no forward of it is outstanding, and always in the
same layout: a parameter without a gradient on this rank is a zeroed slot. So ranks that use
different parameters of a group still issue the same collectives. Whether any rank used a parameter
travels with the reduction as a mark. That is once per backward; only reentrant checkpointing,
which hides forwards from us until backward reruns them, can make a group that it reruns twice
reduce twice.

[Note: ways] A reduction goes one of two ways, by what all ranks know. With those of the groups
that are gathered before and after it, if it is small; see ``buckets``. Else it is packed and
launched by itself. In a world of one, gradients that would come back as they are go no way at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import (
    EventKind,
    ReduceLane,
    ReduceScaling,
    ReduceScatterLike,
    backend_averages,
    default_reduce_scatter,
    emit,
    foreach_reduce,
    joined_cap_mb,
    reduction_scaling,
)
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.plan import GroupPlan, ReductionPlan
from fullshard.sharding.reduce.alias_reduction import aliased_reduction
from fullshard.sharding.reduce.reduction import InFlight, PendingReduction, SharedComm
from fullshard.sharding.reduce.reduction_bucket import (
    GroupReduction,
    ReductionBucket,
    ReductionSetup,
)
from fullshard.sharding.reduce.replicas import (
    BufferHook,
    Launched,
    Replication,
    no_hook,
    replication_of,
)

_MAX_INPUTS = 1  # as in torch: two took as long a step, and more memory

__all__ = ["GroupGradients", "TakenGradients"]


@dataclass(frozen=True)
class TakenGradients:
    """Unsharded gradients on their way into a reduction.

    Attributes:
        plans: the reductions to launch; none where nothing is to be reduced.
        gradients: per parameter of the group, the full gradient or None.
    """

    plans: tuple[ReductionPlan, ...] = ()
    gradients: tuple[torch.Tensor | None, ...] = ()


class GroupGradients:
    """The gradients of one group.

    Attributes:
        replicas: what follows a reduce-scatter.
        synchronise: whether to reduce at all (``set_requires_gradient_sync``).
        force_sum: whether the backend is asked for sums only.
        zero_unused: whether a parameter that no rank used gets zeros instead of no gradient.
        keep_unsynced: whether gradients accumulated without communication outlive a backward that
            raises.
        unsynced: whether backwards that ended well left gradients unreduced.
        reductions: reductions launched so far.
        reached: whether the present backward reached a forward of the group.
        reduced: whether the present backward reduced the group.
        late: whether it ended a forward of the group after that, whose gradients are still to be
            reduced.
        bucket: where reductions of groups that are gathered together wait; see ``Buckets``.
        bucket_cap_mb: MiB of small reductions that may share a launch; 0: each has its own.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh_info: FSDPMeshInfo,
        device: torch.device,
        shared: SharedComm,
    ) -> None:
        """Starts with none."""
        self.params = params
        self.mesh_info = mesh_info
        self.device = device
        self.synchronise = True
        self.keep_unsynced = False
        self.unsynced = False
        self.reductions = 0
        self.reached = False
        self.reduced = False
        self.late = False
        self._comm: ReduceScatterLike = default_reduce_scatter(mesh_info.shard_process_group)
        self._is_default = True  # whether nobody replaced the collective
        self._process_group = mesh_info.shard_process_group
        self._divide_factor: float | torch.Tensor | None = None
        self._hook = no_hook
        self._max_inputs = _MAX_INPUTS
        self.force_sum = False
        self.zero_unused = False
        self.bucket: ReductionBucket | None = None
        self.bucket_cap_mb = joined_cap_mb(mesh_info.shard_world_size)
        self._shared = shared
        self.replicas: Replication = replication_of(mesh_info)
        self._setups: dict[ReductionPlan, ReductionSetup] = {}

    def share(self, shared: SharedComm) -> None:
        """Makes the reductions run on the streams of a root and wait in its queue."""
        self._shared = shared
        self._setups.clear()

    def set_comm(self, comm: ReduceScatterLike) -> None:
        """Replaces the collective that reduces them."""
        self._comm = comm
        self._is_default = False
        self._setups.clear()

    @property
    def comm(self) -> ReduceScatterLike:
        """The collective that reduces them."""
        return self._comm

    def set_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Reduces over ``process_group``, which has the ranks of the mesh's shard axis."""
        self._process_group = process_group
        self._setups.clear()

    def set_force_sum(self, enable: bool) -> None:
        """Asks the backend for sums only."""
        self.force_sum = enable
        self._setups.clear()

    def set_max_inputs(self, count: int) -> None:
        """Sets how many packed inputs may be alive at once."""
        self._max_inputs = count
        self._setups.clear()

    def set_replicas(self, replicas: Replication) -> None:
        """Replaces what follows a reduce-scatter."""
        self.replicas = replicas
        self._setups.clear()

    def set_hook(self, hook: Callable[[torch.Tensor], None], stream: Any) -> None:
        """Calls ``hook`` with each reduced buffer."""
        self._hook = BufferHook(hook, stream)

    def set_divide_factor(self, factor: float | torch.Tensor) -> None:
        """Divides the sum by ``factor``, or by what it holds then, instead of the world size."""
        self._divide_factor = factor
        self._setups.clear()

    @property
    def done(self) -> bool:
        """Whether the present backward reduced all that it has to reduce of the group so far."""
        return self.reduced and not self.late

    @property
    def waiting(self) -> bool:
        """Whether any unsharded gradient is there that this backward did not reduce."""
        return any(
            param.has_gradient or (param.aside and not self.reduced) for param in self.params
        )

    def take(self, plan: GroupPlan, *, reduce: bool) -> TakenGradients:
        """Returns what is to be reduced now: nothing if it is not time, or synchronisation is off.

        Gradients that stay behind are kept in the reduce dtype.

        Args:
            plan: the group's layouts.
            reduce: whether it is time.
        """
        if not (reduce and self.synchronise):
            for param in self.params:
                param.stash_gradient()
            return TakenGradients()
        aside, self.reduced = not self.reduced, True  # the first reduction has what is aside
        return TakenGradients(
            plans=plan.reductions(self.params),
            gradients=tuple(param.take_gradient(aside=aside) for param in self.params),
        )

    def reduce(self, taken: TakenGradients, name: str) -> None:
        """Launches the reductions of ``taken``."""
        for plan in taken.plans:
            self.reductions += 1
            setup, gradients = self._setup(plan, name), taken.gradients
            if len(plan.indices) < len(gradients):
                gradients = tuple([gradients[index] for index in plan.indices])
            reduction = GroupReduction(setup, gradients, self._launch)
            if self.bucket is not None and self._may_join(setup):
                emit(EventKind.REDUCE, name, rank=self.mesh_info.shard_rank)
                self.bucket.put(reduction, self.bucket_cap_mb)
            else:
                self._shared.queue.make_room(self._max_inputs)
                emit(EventKind.REDUCE, name, rank=self.mesh_info.shard_rank)
                self._launch(reduction)

    def _may_join(self, setup: ReductionSetup) -> bool:
        """Tells whether a reduction may share a launch with its neighbours'; see [Note: ways]."""
        return (
            self._may_wait
            and not self.zero_unused
            and not isinstance(self._divide_factor, torch.Tensor)
        )

    def _launch(self, reduction: GroupReduction) -> None:
        setup, gradients = reduction.setup, reduction.gradients
        in_flight = self._in_flight(reduction)
        self._shared.queue.push(
            PendingReduction(
                names=(setup.name,),
                rank=self.mesh_info.shard_rank,
                params=setup.params,
                in_flight=in_flight,
                complete=self.replicas.complete,
                lacks_gradient=not self.zero_unused and any(grad is None for grad in gradients),
            )
        )

    def _in_flight(self, reduction: GroupReduction) -> InFlight:
        """Returns the reduction in flight, on its own; see [Note: ways]."""
        setup, gradients = reduction.setup, reduction.gradients
        plan, lane = setup.plan, setup.lane
        if plan.layout.world_size == 1 and self._ends_here:
            aliased = aliased_reduction(gradients, plan.layout, lane)
            if aliased is not None:
                return aliased
        launched = foreach_reduce(gradients, plan.layout, lane)
        follower = Launched(
            reduction=launched,
            plan=plan,
            scaling=setup.scaling,
            shared=self._shared,
            name=setup.name,
        )
        hook = self._hook if self.replicas.complete else no_hook
        return hook(self.replicas.follow(follower), follower)

    @property
    def _ends_here(self) -> bool:
        """Whether nothing follows a reduce-scatter."""
        return self._hook is no_hook and not self.replicas.follows

    @property
    def _may_wait(self) -> bool:
        """Whether buckets are on, nobody sees each reduce-scatter, and nothing follows it."""
        return self.bucket_cap_mb > 0 and self._is_default and self._ends_here

    def _setup(self, plan: ReductionPlan, name: str) -> ReductionSetup:
        setup = self._setups.get(plan)
        varies = isinstance(self._divide_factor, torch.Tensor)  # may be another each time
        if setup is None or setup.name != name or varies:
            scaling = self._scaling(plan.dtype)
            lane = ReduceLane(
                comm=self._comm,
                process_group=self._process_group,
                streams=self._shared.streams,
                device=self.device,
                scaling=self.replicas.before(scaling),
                name=name,
                inputs_in_flight=self._max_inputs,
                source=self._shared.source,
            )
            setup = self._setups[plan] = ReductionSetup(
                name=name,
                plan=plan,
                params=[self.params[index] for index in plan.indices],
                lane=lane,
                scaling=scaling,
                nbytes=sum(spec.slice_nbytes for spec in plan.layout.buffers)
                * plan.layout.world_size,
            )
        return setup

    def _scaling(self, dtype: torch.dtype) -> ReduceScaling:
        return reduction_scaling(
            self.mesh_info.data_parallel_size,
            dtype,
            averages=all(backend_averages(each, dtype) for each in self.mesh_info.process_groups),
            divide_factor=self._divide_factor,
            force_sum=self.force_sum,
        )

    def end_of_backward(self, *, waiting: bool) -> None:
        """Forgets where the group stood in the backward that ended well.

        ``waiting``: whether it left unsharded gradients.
        """
        self.unsynced = waiting
        for param in self.params if self.keep_unsynced else ():
            if self.reduced:
                param.drop_aside()
            elif param.has_gradient:
                param.set_gradient_aside()
        self.replicas.end_of_backward()
        self.reached = False
        self.reduced = False
        self.late = False

    def abandon(self) -> bool:
        """Drops the gradients of a backward that did not end, and tells whether others went along.

        Those are of backwards that ended well, accumulated without communication; they stay if
        ``keep_unsynced``.
        """
        lost = (self.unsynced or self.replicas.unsynced) and not self.keep_unsynced
        for param in self.params:
            param.drop_gradient()
        self.replicas.abandon(keep=self.keep_unsynced)
        self.unsynced = self.unsynced and self.keep_unsynced
        self.reached = False
        self.reduced = False
        self.late = False
        return lost

    def forget(self) -> None:
        """Drops every unsharded gradient: the parameters were replaced."""
        for param in self.params:
            param.drop_gradient()
            param.drop_aside()
        self._setups.clear()
        if self.bucket is not None:
            self.bucket.forget()
        self.unsynced = False
        self.replicas.abandon(keep=False)
