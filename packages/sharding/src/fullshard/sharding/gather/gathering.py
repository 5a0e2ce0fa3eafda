"""A group's parameters, sharded or gathered: the state machine and the memory behind it.

Owns the state, the transitions, the gather in flight and the unsharded memory. It refuses to know
who wants the parameters and for how long: ``FSDPParamGroup`` asks for one state or the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fullshard.comm import (
    AllGatherLike,
    EventKind,
    GatherLane,
    Layout,
    default_all_gather,
    emit,
    foreach_all_gather,
)
from fullshard.sharding.base.outstanding import Outstanding
from fullshard.sharding.base.states import ShardedState, check_transition
from fullshard.sharding.gather.contents import GatherContents, GatherInFlight, PlainContents
from fullshard.sharding.gather.hooked import HookContext, HookedContents
from fullshard.sharding.gather.store import OwnStore
from fullshard.sharding.groups.debug import CopyWatch
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo
from fullshard.sharding.mesh.smaller_world import SmallerWorld
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.plan import GroupPlan
from fullshard.sharding.params.sources import has_hooks
from fullshard.sharding.params.staging import StagedShards
from fullshard.sharding.params.swap import Swap
from fullshard.sharding.protocols import ParameterDTypes, Staging
from fullshard.sharding.reduce.reduction import SharedComm

__all__ = ["GatherPart", "Gathering", "GroupPolicies"]


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
    contents: GatherContents


@dataclass(frozen=True)
class GatherPart:
    """What a gather of several groups needs of one.

    Attributes:
        contents: what it moves.
        layout: its own layout.
        lane: what it would be gathered with by itself.
    """

    contents: PlainContents
    layout: Layout
    lane: GatherLane


class Gathering:
    """The parameters of one group and where they are.

    Attributes:
        params: the parameters.
        name: the group's name, for messages and events.
        gathers: gathers launched so far.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh_info: FSDPMeshInfo,
        device: torch.device,
        policies: GroupPolicies,
        shared: SharedComm,
        outstanding: Outstanding,
    ) -> None:
        """Starts sharded. ``outstanding``: the forwards for which a smaller world is kept."""
        self.params = tuple(params)
        self.name = ""
        self.gathers = 0
        self._mesh_info = mesh_info
        self._device = device
        self._policies = policies
        self._outstanding = outstanding
        self._lane = GatherLane(
            comm=default_all_gather(mesh_info.shard_process_group),
            process_group=mesh_info.shard_process_group,
            streams=shared.streams,
            device=device,
            source=shared.source,
        )
        self._state = ShardedState.SHARDED
        self._generation = outstanding.generation
        self._gathered_of = self._generation.number
        self._prepared: _Prepared | None = None
        self._in_flight: GatherInFlight | None = None
        self._gathered_from = ShardedState.SHARDED
        self._smaller: SmallerWorld | None = None
        self._staged = StagedShards(policies.dtypes, policies.staging, device, self._generation)
        self._watch = CopyWatch(self._generation)
        self._part: GatherPart | None = None
        self._swap = Swap(self.params)

    # -- set-up -----------------------------------------------------------------------------------

    def share(self, shared: SharedComm) -> None:
        """Makes its gathers run on the streams of a root, in its buffers."""
        self._lane = replace(
            self._lane, streams=shared.streams, source=shared.source, name=self.name
        )

    @property
    def lane(self) -> GatherLane:
        """What gathers with its own collective share."""
        return self._lane

    @property
    def comm(self) -> AllGatherLike:
        """The collective that gathers."""
        return self._lane.comm

    @comm.setter
    def comm(self, comm: AllGatherLike) -> None:
        self._lane = replace(self._lane, comm=comm)

    @property
    def smaller_size(self) -> int:
        """Ranks over which it is sharded between forward and backward; 0: over none but its own."""
        return 0 if self._smaller is None else self._smaller.mesh_info.shard_world_size

    def set_smaller(self, mesh_info: FSDPMeshInfo | None) -> None:
        """Keeps shards over a smaller world between forward and backward; None: keeps nothing."""
        self._smaller = None if mesh_info is None else SmallerWorld(mesh_info)

    @property
    def plan(self) -> GroupPlan:
        """The layouts, computed at the first call and when dtypes have changed since."""
        return self.prepare().plan

    def prepare(self) -> _Prepared:
        """Returns plan and memory, made at the first call and when dtypes have changed since."""
        if self._prepared is None:
            for param in self.params:
                param.resolve_dtypes(self._policies.dtypes)
            plan = GroupPlan.of(self.params, self._mesh_info.shard_world_size)
            self._prepared = _Prepared(plan=plan, contents=self._contents(plan))
        return self._prepared

    def _contents(self, plan: GroupPlan) -> GatherContents:
        stored = [param for param in self.params if not has_hooks(param.name, param.shard)]
        specs = [param.gather_spec for param in stored]
        hooked = len(stored) < len(self.params)
        store = OwnStore(specs, self._device, [param.kind.to_use for param in stored])
        for param, unsharded in zip(stored, store.params, strict=True):
            param.attach_unsharded(unsharded)
        if not hooked:
            return PlainContents(self.params, store, plan.gather)
        context = HookContext(
            mesh_info=self._mesh_info, device=self._device, policy=self._policies.dtypes
        )
        return HookedContents(self.params, store, context)

    def adopt_registered(self) -> bool:
        """Looks at what the modules hold now, and returns whether anything changed.

        So it does if the policy now answers otherwise, as a new root gives parameters other names.
        See ``FSDPParam.adopt_registered``.
        """
        changed = [param.adopt_registered() for param in self.params]
        if self._prepared is not None:
            changed += [not param.has_dtypes_of(self._policies.dtypes) for param in self.params]
        if any(changed):
            self._to_sharded()
            self._prepared = None
            self._staged.forget()
        return any(changed)

    @property
    def replaced(self) -> bool:
        """Whether modules hold something else than its parameters: a user put it there."""
        return self._swap.replaced

    def note(self) -> None:
        """Begins to watch full parameters that nobody uses now."""
        if self._state is ShardedState.UNSHARDED:
            self._swap.note()

    def changed(self) -> list[str]:
        """Ends that, and returns those that a user changed, which their shards do not know."""
        changed = self._swap.changed()
        if changed:
            self.prepare().contents.put_back()
        return changed

    def resolve_again(self) -> None:
        """Plans anew if the policy answers otherwise under the names that parameters have now."""
        if self._prepared is None:
            return
        before = [(param.gather_spec.dtype, param.reduce_dtype) for param in self.params]
        for param in self.params:
            param.resolve_dtypes(self._policies.dtypes)
        if before != [(param.gather_spec.dtype, param.reduce_dtype) for param in self.params]:
            self.reshard()
            self._prepared = None
            self._staged.forget()

    # -- the state machine ------------------------------------------------------------------------

    @property
    def state(self) -> ShardedState:
        """Where the parameters are."""
        return self._state

    @property
    def stale(self) -> bool:
        """Whether the parameters changed since the last gather from the ordinary shards."""
        return self._gathered_of != self._generation.number

    def _become(self, after: ShardedState) -> None:
        check_transition(self._state, after, self.name)
        self._state = after

    def unshard(self, *, async_op: bool = False) -> bool:
        """Issues the gather, and returns whether there was one to issue."""
        if self._state in (ShardedState.UNSHARDING, ShardedState.UNSHARDED):
            self._watch.reused(self.params)
            if self._state is ShardedState.UNSHARDED:
                self._swap.to_unsharded()  # functional_call puts back what was there before it
            return False
        prepared = self.prepare()
        contents = prepared.contents
        if self._smaller is not None and self._use_smaller():
            emit(EventKind.UNSHARD, self.name, rank=self._mesh_info.shard_rank)
            self._watch.reused(self.params)
            layout = self._smaller.layout(contents.layout)
            lane = self._lane_of(self._smaller.mesh_info)
            in_flight: GatherInFlight = foreach_all_gather(
                self._smaller.shards, layout, lane, async_op=async_op
            )
        else:
            in_flight = contents.launch(
                self.stage(), self._lane, async_op=async_op, slot=self._smaller is None
            )
            if contents.layout is not prepared.plan.gather:  # hooks decide what travels
                plan = replace(prepared.plan, gather=contents.layout)
                self._prepared = replace(prepared, plan=plan)
            self._gathered_of = self._generation.number
        self._begin(in_flight)
        return True

    def stage(self) -> Sequence[torch.Tensor]:
        """Returns the ordinary shards as the copy-in stream sees them, on their way to a gather."""
        emit(EventKind.UNSHARD, self.name, rank=self._mesh_info.shard_rank)
        self._watch.copied(self.params, self._staged.serving)
        return self._staged.of(self.params, self._lane.streams)

    def _begin(self, in_flight: GatherInFlight) -> None:
        self._in_flight = in_flight
        self._gathered_from = self._state
        self.gathers += 1
        self._become(ShardedState.UNSHARDING)

    def join(self, in_flight: GatherInFlight) -> None:
        """Takes part in a gather of what ``stage()`` gave, which others launched."""
        self._gathered_of = self._generation.number
        self._begin(in_flight)

    @property
    def part(self) -> GatherPart | None:
        """What a gather of several groups needs; None if it must be gathered by itself.

        The same object while nothing of it changes.
        """
        prepared, lane = self._prepared, self._lane
        if prepared is None or self._smaller is not None:
            return None
        contents = prepared.contents.joinable(lane)
        if contents is None:
            return None
        part = self._part
        if part is None or part.contents is not contents or part.lane is not lane:
            self._part = part = GatherPart(contents, prepared.plan.gather, lane)
        return part

    def _lane_of(self, mesh_info: FSDPMeshInfo) -> GatherLane:
        return replace(self._lane, process_group=mesh_info.shard_process_group)

    def wait(self, *, private: bool, movable: bool) -> None:
        """Finishes the gather: the modules hold full parameters after it.

        Args:
            private: a user holds them, who may write.
            movable: no graph holds an alias of them.
        """
        if self._in_flight is None:
            if private and self._state is ShardedState.UNSHARDED:
                self.prepare().contents.take_private(movable=movable)
            return
        contents = self.prepare().contents
        in_flight, self._in_flight = self._in_flight, None
        contents.land(in_flight, private=private, movable=movable)
        self._swap.to_unsharded()
        self._become(ShardedState.UNSHARDED)
        emit(EventKind.WAIT, self.name, rank=self._mesh_info.shard_rank)

    def register(self) -> None:
        """Makes the modules hold what the group is now, whatever they were given."""
        if self._state is ShardedState.UNSHARDED:
            self._swap.to_unsharded()
            return
        for param in self.params:
            param.install_sharded()

    def sync_requires_grad(self) -> None:
        """Lets parameters be frozen, or thawed, on whichever is registered now."""
        if self._state is ShardedState.UNSHARDED:
            self._swap.sync_requires_grad()

    def reshard(self, *, after_forward: bool = False) -> None:
        """Frees the full parameters. ``after_forward``: keeps the smaller world's, if any."""
        if after_forward and self._smaller is not None and self._outstanding:
            self._to_smaller(self._smaller)
        else:
            self._to_sharded()

    def _to_smaller(self, smaller: SmallerWorld) -> None:
        if self._state is ShardedState.UNSHARDED:
            contents = self.prepare().contents
            smaller.keep(contents.fills, contents.layout)
            self._free()
            self._become(ShardedState.SHARDED_POST_FORWARD)
            emit(EventKind.RESHARD, self.name, rank=self._mesh_info.shard_rank)

    def _to_sharded(self) -> None:
        if self._state is ShardedState.UNSHARDING:
            in_flight, self._in_flight = self._in_flight, None
            self._become(self._gathered_from)
            if in_flight is None:  # its copy-out raised
                self.prepare().contents.free()
            else:
                in_flight.discard()
                self.prepare().contents.free()
        if self._state is ShardedState.UNSHARDED:
            self._free()
            self._become(ShardedState.SHARDED)
            emit(EventKind.RESHARD, self.name, rank=self._mesh_info.shard_rank)
        if self._smaller is not None and not self._use_smaller():
            self._smaller.drop()

    def _use_smaller(self) -> bool:
        """Tells whether to gather from the smaller world; leaves it if it is stale or unneeded."""
        if self._state is not ShardedState.SHARDED_POST_FORWARD:
            return False
        if self._outstanding and not self.stale:
            return True
        self._become(ShardedState.SHARDED)
        return False

    def leave_smaller(self) -> None:
        """Gives back what the smaller world keeps."""
        if self._smaller is not None and self._state is ShardedState.SHARDED_POST_FORWARD:
            self._become(ShardedState.SHARDED)
            self._smaller.drop()

    def _free(self) -> None:
        self._swap.to_sharded()
        self.prepare().contents.free()
