"""The parameters that communicate together, as a state machine held by leases.

Owns the group's state, its unsharded memory and its gather; gradients and their reduction are in
``GroupGradients``. It refuses to know modules' forward or backward: it is told that somebody takes
or returns a lease, and reshards when the last one returned.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fullshard.comm import (
    AllGatherInFlight,
    AllGatherLike,
    EventKind,
    GatherLane,
    default_all_gather,
    emit,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_all_gather_discard,
)
from fullshard.sharding.generation import current_generation
from fullshard.sharding.gradients import GroupGradients
from fullshard.sharding.leases import LeaseKind, Leases
from fullshard.sharding.mesh import FSDPMeshInfo
from fullshard.sharding.outstanding import Outstanding
from fullshard.sharding.param import FSDPParam
from fullshard.sharding.plan import GroupPlan
from fullshard.sharding.protocols import ParameterDTypes, Staging
from fullshard.sharding.reduction import SharedComm
from fullshard.sharding.smaller_world import SmallerWorld
from fullshard.sharding.states import ShardedState, TrainingState, check_transition
from fullshard.sharding.store import OwnStore
from fullshard.sharding.use import Use

__all__ = ["FSDPParamGroup", "GroupPolicies"]


@dataclass(frozen=True, kw_only=True)
class GroupPolicies:
    """The policies that a group itself asks.

    Attributes:
        dtypes: in what dtype a parameter is gathered and reduced.
        staging: where shards and gradients live.
    """

    dtypes: ParameterDTypes
    staging: Staging


@dataclass(frozen=True)
class _Prepared:
    """What is computed once, before the first gather: a group without it has never been used."""

    plan: GroupPlan
    store: OwnStore


class FSDPParamGroup:
    """The parameters of one ``fully_shard`` call.

    Attributes:
        params: its parameters, in the order of their first place in the modules.
        name: the full name of its module, for messages and events.
        leases: who holds it unsharded.
        gradients: its gradients and how they are reduced.
        gathers: gathers launched so far.
        dead: numbers of forwards whose graphs died, until the group gives back what they held.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh_info: FSDPMeshInfo,
        device: torch.device,
        policies: GroupPolicies,
        shared: SharedComm,
    ) -> None:
        """Starts sharded, and communicates through what its module shares until a root is found."""
        self.params = tuple(params)
        self.mesh_info = mesh_info
        self.device = device
        self.policies = policies
        self.name = ""
        self.rank = mesh_info.shard_rank
        self.leases = Leases()
        self.gathers = 0
        self._lane = GatherLane(
            comm=default_all_gather(mesh_info.shard_process_group),
            process_group=mesh_info.shard_process_group,
            streams=shared.streams,
            device=device,
        )
        self.gradients = GroupGradients(self.params, mesh_info, device, shared)
        self._state = ShardedState.SHARDED
        self._generation = current_generation()
        self._prepared: _Prepared | None = None
        self._in_flight: AllGatherInFlight | None = None
        self._gathered_from = ShardedState.SHARDED
        self.dead: deque[int] = deque()  # filled by any thread
        self._outstanding = Outstanding()
        self._live: weakref.WeakSet[Use] = weakref.WeakSet()
        self._smaller: SmallerWorld | None = None
        self._kept_in_this_forward = False

    # -- set-up -----------------------------------------------------------------------------------

    def share(self, shared: SharedComm) -> None:
        """Makes the group run on the streams of its root and queue its reductions there."""
        self._lane = replace(self._lane, streams=shared.streams, name=self.name)
        self.gradients.share(shared)

    @property
    def all_gather(self) -> AllGatherLike:
        """The collective that gathers parameters."""
        return self._lane.comm

    def set_all_gather(self, comm: AllGatherLike) -> None:
        """Replaces the collective that gathers parameters."""
        self._lane = replace(self._lane, comm=comm)

    @property
    def smaller_size(self) -> int:
        """Ranks over which it is sharded between forward and backward; 0: over none but its own."""
        return 0 if self._smaller is None else self._smaller.mesh_info.shard_world_size

    def reshard_to(self, mesh_info: FSDPMeshInfo | None) -> None:
        """Keeps shards over a smaller world between forward and backward; None: keeps nothing."""
        self.reshard()
        self._smaller = None if mesh_info is None else SmallerWorld(mesh_info)

    def prepare(self) -> _Prepared:
        """Returns plan and memory, made at the first call and when dtypes have changed since."""
        if self._prepared is None:
            for param in self.params:
                param.resolve_dtypes(self.policies.dtypes)
            plan = GroupPlan.of(self.params, self.mesh_info.shard_world_size)
            store = OwnStore([param.gather_spec for param in self.params], self.device)
            for param, unsharded in zip(self.params, store.params, strict=True):
                param.attach_unsharded(unsharded)
            self._prepared = _Prepared(plan=plan, store=store)
        return self._prepared

    def adopt_registered(self) -> None:
        """Looks at what the modules hold now; see ``FSDPParam.adopt_registered``."""
        changed = [param.adopt_registered() for param in self.params]
        if any(changed):
            self._prepared = None
            self.gradients.forget()

    # -- the state machine ------------------------------------------------------------------------

    @property
    def state(self) -> ShardedState:
        """Where its parameters are."""
        return self._state

    @property
    def training_state(self) -> TrainingState:
        """What it is doing, for people to read."""
        if self.leases.training_state is TrainingState.IDLE and self.gradients.reduced:
            return TrainingState.POST_BACKWARD
        return self.leases.training_state

    def _become(self, after: ShardedState) -> None:
        check_transition(self._state, after, self.name)
        self._state = after

    def unshard(self, *, async_op: bool = False) -> bool:
        """Issues the gather, and returns whether there was one to issue.

        Whoever calls this holds a lease.
        """
        if self._state in (ShardedState.UNSHARDING, ShardedState.UNSHARDED):
            return False
        layout = self.prepare().plan.gather
        emit(EventKind.UNSHARD, self.name, rank=self.rank)
        if self._smaller is not None and self._use_smaller():
            shards, lane = self._smaller.shards, self._lane_of(self._smaller.mesh_info)
            layout = self._smaller.layout(self.params, layout)
        else:
            staging, lane = self.policies.staging, self._lane
            shards = [staging.stage_in(param.shard, self.device) for param in self.params]
            self._generation = current_generation()
        self._in_flight = foreach_all_gather(shards, layout, lane, async_op=async_op)
        self._gathered_from = self._state
        self.gathers += 1
        self._become(ShardedState.UNSHARDING)
        return True

    def wait_for_unshard(self) -> None:
        """Finishes the gather: the modules hold full parameters after it."""
        if self._in_flight is None:
            return
        store = self.prepare().store
        store.allocate()
        in_flight, self._in_flight = self._in_flight, None
        foreach_all_gather_copy_out(in_flight, store.fills)
        for param in self.params:
            param.to_unsharded()
        self._become(ShardedState.UNSHARDED)
        emit(EventKind.WAIT, self.name, rank=self.rank)

    def _lane_of(self, mesh_info: FSDPMeshInfo) -> GatherLane:
        return replace(self._lane, process_group=mesh_info.shard_process_group)

    def settle(self, *, after_forward: bool = False) -> None:
        """Reshards if nobody holds the group.

        ``after_forward``: to the smaller world if there is one and a backward may follow.
        """
        if self.leases.held:
            return
        if after_forward and self._smaller is not None and self._outstanding:
            self._become_sharded_post_forward(self._smaller)
        else:
            self._become_sharded()

    def _become_sharded_post_forward(self, smaller: SmallerWorld) -> None:
        if self._state is ShardedState.UNSHARDED:
            smaller.keep(self.params)
            self._free()
            self._become(ShardedState.SHARDED_POST_FORWARD)
            emit(EventKind.RESHARD, self.name, rank=self.rank)

    def _become_sharded(self) -> None:
        if self._state is ShardedState.UNSHARDING:
            in_flight, self._in_flight = self._in_flight, None
            self._become(self._gathered_from)
            if in_flight is None:  # its copy-out raised
                self.prepare().store.free()
            else:
                foreach_all_gather_discard(in_flight)
        if self._state is ShardedState.UNSHARDED:
            self._free()
            self._become(ShardedState.SHARDED)
            emit(EventKind.RESHARD, self.name, rank=self.rank)
        if self._smaller is not None and not self._use_smaller():
            self._smaller.drop()

    def _use_smaller(self) -> bool:
        """Tells whether to gather from the smaller world; leaves it if it is stale or unneeded."""
        if self._state is not ShardedState.SHARDED_POST_FORWARD:
            return False
        if self.outstanding and self._generation == current_generation():
            return True
        self._become(ShardedState.SHARDED)
        return False

    def _free(self) -> None:
        for param in self.params:
            param.to_sharded()
        self.prepare().store.free()

    def refresh(self) -> None:
        """Throws away an unsharded copy that must not serve, before a forward or a user takes it.

        One from before the parameters changed; and one that only graphs of earlier forwards hold,
        which may have died on other ranks: see [Note: shared facts]. Their backward gathers again.
        """
        if self._generation != current_generation():
            self.leases.drop(LeaseKind.KEPT, LeaseKind.PREFETCH)
            self._become_sharded()
        elif self.leases.held_for(LeaseKind.GRAPH) and not self._kept_in_this_forward:
            self.leases.drop(LeaseKind.GRAPH)
            self.settle()
        self._kept_in_this_forward = True

    def end_of_forward(self) -> None:
        """Ends the root's forward: what graphs hold from now on is a rank's own affair."""
        self._kept_in_this_forward = False
        self.drop_leases(LeaseKind.PREFETCH)

    # -- leases -----------------------------------------------------------------------------------

    def claim(self, kind: LeaseKind, owner: int = 0) -> None:
        """Takes a lease; what was gathered ahead or kept is this user's from now on."""
        self.leases.take(kind, owner)
        self.leases.drop(LeaseKind.PREFETCH, LeaseKind.KEPT)
        if self._state is ShardedState.UNSHARDED:
            for param in self.params:  # it was registered, so this is where a user set the flag
                param.sync_requires_grad()

    def give_back(self, kind: LeaseKind, owner: int = 0) -> None:
        """Returns a lease, and reshards if it was the last."""
        self.leases.give_back(kind, owner)
        self.settle(after_forward=kind is LeaseKind.FORWARD)

    def prefetch(self) -> None:
        """Gathers ahead of use; nothing happens to a group that is unsharded or being so."""
        if self._state in (ShardedState.UNSHARDING, ShardedState.UNSHARDED):
            return
        self.leases.hold(LeaseKind.PREFETCH)
        emit(EventKind.PREFETCH, self.name, rank=self.rank)
        self.unshard(async_op=True)

    def reshard(self) -> None:
        """Returns what a user, a graph, a prefetch, a kept copy or the smaller world holds."""
        self.leases.drop(LeaseKind.USER, LeaseKind.GRAPH, LeaseKind.PREFETCH, LeaseKind.KEPT)
        self.settle()
        if self._smaller is not None and self._state is ShardedState.SHARDED_POST_FORWARD:
            self._become(ShardedState.SHARDED)
            self._smaller.drop()

    def drop_leases(self, *kinds: LeaseKind) -> None:
        """Returns every lease of ``kinds``, and reshards if nobody holds the group then."""
        self.leases.drop(*kinds)
        self.settle()

    # -- forwards that a backward may follow ------------------------------------------------------

    @property
    def outstanding(self) -> bool:
        """Whether a forward of the group awaits its backward."""
        return bool(self._outstanding)

    def add_use(self, use: Use) -> None:
        """Counts ``use`` as outstanding, unless it is a recomputation, which may never end."""
        self._live.add(use)
        if not use.recompute:
            self._outstanding.add(use.number)

    def bury(self) -> None:
        """Gives back what forwards held whose graphs died; on the main thread, between steps."""
        while self.dead:
            number = self.dead.popleft()
            self._outstanding.abandon(number)
            self.leases.give_back(LeaseKind.GRAPH, number)
            self.give_back(LeaseKind.BACKWARD, number)

    def begin_backward(self, use: Use) -> None:
        """Holds the group for the backward of ``use``."""
        self.claim(LeaseKind.BACKWARD, use.number)
        self.gradients.reached = True

    def end_use(self, use: Use, *, keep: bool) -> None:
        """Ends the backward of ``use``; the last one reduces. ``keep``: leave it unsharded."""
        last = self._outstanding.end(use.number) or (use.recompute and not self._outstanding)
        emit(EventKind.POST_BACKWARD, self.name, rank=self.rank)
        self._return_backward(use.number, keep=keep, reduce=last)

    def finish_backward(self, *, keep: bool) -> None:
        """Ends what backward began and did not end: called once, when all of backward is over.

        Raises:
            RuntimeError: if a parameter received a gradient after its group was reduced.
        """
        late = [
            param.name for param in self.params if param.has_gradient and self.gradients.reduced
        ]
        # A use in a tied group may be closed already, by the first of its groups to finish.
        begun = [use for use in self._live if use.in_backward or use.done]
        open_uses = [use for use in begun if use.in_backward or use.number in self._outstanding]
        for use in open_uses:
            use.close()
            self._outstanding.end(use.number)
            self.leases.give_back(LeaseKind.GRAPH, use.number)
        self.leases.drop(LeaseKind.BACKWARD, LeaseKind.RECOMPUTE, LeaseKind.PREFETCH)
        if open_uses:
            emit(EventKind.POST_BACKWARD, self.name, rank=self.rank)
        reached = self.gradients.reached or self.gradients.waiting
        self._return_backward(
            0, keep=keep and reached, reduce=reached and not self.gradients.reduced
        )
        self.gradients.end_of_backward()
        if late:
            raise RuntimeError(
                f"{', '.join(late)} received a gradient after parameter group {self.name!r} had "
                "been reduced, so the sharded gradient lacks it; give the module's inputs a path "
                "to every output that is used, or shard the part that has none by itself"
            )

    def _return_backward(self, number: int, *, keep: bool, reduce: bool) -> None:
        taken = self.gradients.take(self.prepare().plan, reduce=reduce)  # while they are unsharded
        self.leases.give_back(LeaseKind.GRAPH, number)
        self.leases.give_back(LeaseKind.BACKWARD, number)
        self.leases.give_back(LeaseKind.RECOMPUTE)
        if keep and self._state is ShardedState.UNSHARDED:
            self.leases.hold(LeaseKind.KEPT)
        self.settle()
        self.gradients.reduce(taken, self.name)

    def reset(self) -> None:
        """Comes back to a clean sharded state: no lease, no gradient waiting, nothing in flight."""
        for use in list(self._live):
            use.close()
        self._outstanding.clear()
        self.leases = Leases()
        self.settle()
        self.gradients.forget()
        self.gradients.end_of_backward()

    def __repr__(self) -> str:
        """Shows name and state."""
        return f"FSDPParamGroup({self.name}, {self._state.name}, {self.leases})"
