"""What a group's gather moves, and what its parameters are made of once it has arrived.

Owns the protocol that ``Gathering`` is written against, and the ordinary contents: one tensor per
parameter, filled in place. Parameters with hooks around their gather are ``hooked``'s.

[Note: two stores] Where ranks share memory, a group is gathered in a slot that all of them map, and
its parameters lie there. Whether a gather is one in a slot follows from facts that all ranks share.
Where parameters lie is each rank's own affair: a user's ``unshard()`` gets private memory, to which
the slot is copied, since a user may write; and while a graph lives they stay where its forward had
them. So the death of a graph, which ranks notice at different times, changes no collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Protocol

import torch
from torch import nn

from fullshard.comm import (
    AllGatherInFlight,
    AllGatherLike,
    FullTensors,
    GatherLane,
    Layout,
    OwnShards,
    SlotGatherInFlight,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_all_gather_in_slot,
)
from fullshard.comm.runtime.compat import foreach_copy
from fullshard.sharding.gather.alias_store import (
    AliasedGather,
    AliasStore,
    CopiedGather,
    is_alone,
    lie_as_used,
)
from fullshard.sharding.gather.slot_store import SlotStore, open_slot_store
from fullshard.sharding.gather.store import OwnStore
from fullshard.sharding.params.param import FSDPParam

__all__ = [
    "GatherContents",
    "GatherInFlight",
    "JoinedGather",
    "PlainContents",
    "TravellingShards",
]


class JointLaunch(Protocol):
    """A gather of several groups in flight."""

    def land(self) -> None:
        """Fills the memory of all groups; later calls do nothing."""
        ...

    def drop(self, place: int) -> None:
        """Takes notice that the group at ``place`` does not want its part."""
        ...


@dataclass(frozen=True)
class JoinedGather:
    """One group's part in a gather that several share; see ``GatherBucket``."""

    joint: JointLaunch
    place: int

    def discard(self) -> None:
        """Gives the part up."""
        self.joint.drop(self.place)


GatherInFlight = (
    AllGatherInFlight | SlotGatherInFlight | JoinedGather | AliasedGather | CopiedGather
)
"""A gather that was issued: of buffers, in a slot, with others, or of what is there
already, to be used as it is or copied."""


class GatherContents(Protocol):
    """What does a group's gather move, and where to?"""

    @property
    def layout(self) -> Layout:
        """Where everything lies in the gather that was launched last."""
        ...

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """The tensors that a gather writes, in the order of the layout."""
        ...

    def launch(
        self, staged: Sequence[torch.Tensor], lane: GatherLane, *, async_op: bool, slot: bool
    ) -> GatherInFlight:
        """Issues a gather.

        Args:
            staged: the shard of each parameter, as the copy-in stream sees it.
            lane: what to gather with.
            async_op: ask for a work handle on accelerators, too.
            slot: whether it may be one in a slot; the same on all ranks.
        """
        ...

    def land(self, in_flight: GatherInFlight, *, private: bool, movable: bool) -> None:
        """Waits for a gather and makes the unsharded parameters of what came.

        Args:
            in_flight: the gather, of this ``layout`` or of a smaller world's.
            private: a user holds them, who may write.
            movable: no graph holds an alias of them.
        """
        ...

    def joinable(self, lane: GatherLane) -> PlainContents | None:
        """Returns what may be gathered with other groups' in one launch; None: this may not."""
        ...

    def take_private(self, *, movable: bool) -> None:
        """Moves unsharded parameters where a user may write, if that is possible now.

        Args:
            movable: no graph holds an alias of them.
        """
        ...

    def put_back(self) -> None:
        """Makes unsharded parameters that a user moved lie where gathers put them."""
        ...

    def free(self) -> None:
        """Gives the memory back."""
        ...


class TravellingShards:
    """The shards of some parameters as a gather sends them, kept for the next one.

    Only those in memory of the parameters are kept: what was staged in or cast may move.
    """

    def __init__(self, params: Sequence[FSDPParam], layout: Layout) -> None:
        """Takes the parameters in the order of ``layout``."""
        self._params = tuple(params)
        self._layout = layout
        self._to_travel = [param.kind.to_travel for param in params]
        self._staged: Sequence[torch.Tensor] = ()  # the shards of which the next are made
        self._kept: OwnShards | None = None

    def keeps(self, shards: OwnShards) -> bool:
        """Whether these are kept for the next gather: they lie in memory of the parameters."""
        return shards is self._kept

    def of(self, staged: Sequence[torch.Tensor], lane: GatherLane) -> OwnShards:
        """Returns what travels of ``staged``, the shards as the copy-in stream sees them."""
        kept = self._kept
        if kept is not None and all(map(is_, staged, self._staged)):
            return kept
        travelling = [
            to_travel(shard) for to_travel, shard in zip(self._to_travel, staged, strict=True)
        ]
        own = OwnShards(travelling, self._layout, lane)
        if all(shard is param.shard for shard, param in zip(staged, self._params, strict=True)):
            self._staged, self._kept = tuple(staged), own
        return own


class PlainContents:
    """Each parameter is one tensor, which is gathered as it is used."""

    def __init__(self, params: Sequence[FSDPParam], store: OwnStore, layout: Layout) -> None:
        """Takes the memory of all of ``params``; what the modules see is made already."""
        self.layout: Layout = layout
        self._packed = layout
        self._own = store
        self._travelling = TravellingShards(params, layout)
        self._to_use = [param.kind.to_use for param in params]
        self._filled: dict[Layout, FullTensors] = {}  # a smaller world has a layout of its own
        self._asked: AllGatherLike | None = None  # the collective that was asked for a slot
        self._slot: SlotStore | None = None  # what it gave
        self._alias: AliasStore | None = None  # the shards that served last, in a world of one
        # where the parameters lie; None: in private memory
        self._home: SlotStore | AliasStore | None = None
        self._occupied = False  # whether this rank keeps others from gathering in the slot

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """One tensor per parameter."""
        return self._own.fills if self._home is None else self._home.fills

    def launch(
        self, staged: Sequence[torch.Tensor], lane: GatherLane, *, async_op: bool, slot: bool
    ) -> GatherInFlight:
        """Issues a gather of one tensor per parameter: its shard."""
        shards = self._travelling.of(staged, lane)
        if self._packed.world_size == 1 and self._travelling.keeps(shards) and is_alone(lane):
            self.layout = self._packed
            alias = self._aliased(shards, lane)
            return CopiedGather.of(shards, lane) if alias is None else AliasedGather(alias)
        if slot and self._asked is not lane.comm:
            self._asked = lane.comm
            self._slot = self._opened(lane)
        if not slot or self._slot is None:
            self.layout = self._packed
            return foreach_all_gather(shards, self.layout, lane, async_op=async_op)
        self.layout = self._packed
        self._occupied = True
        return foreach_all_gather_in_slot(shards.tensors, self._slot.full, lane)

    def _aliased(self, shards: OwnShards, lane: GatherLane) -> AliasStore | None:
        """The shards as unsharded parameters, if they may be.

        Of tensor parallel parameters, which are DTensors, the memory cannot be moved.
        """
        if not lie_as_used(shards, lane):
            return None
        if any(type(param) is not nn.Parameter for param in self._own.params):
            return None
        if self._alias is None or not self._alias.is_of(shards):
            self._alias = AliasStore(shards, self._to_use)
        return self._alias

    def _opened(self, lane: GatherLane) -> SlotStore | None:
        if any(type(param) is not nn.Parameter for param in self._own.params):
            return None  # tensor parallel: a DTensor, whose memory cannot be moved
        return open_slot_store(self.layout, lane, self._to_use)

    def land(self, in_flight: GatherInFlight, *, private: bool, movable: bool) -> None:
        """Waits; see [Note: two stores]."""
        movable = movable or isinstance(self._home, AliasStore)  # which a graph keeps itself
        if isinstance(in_flight, AliasedGather):
            if movable:
                self._move(None if private else in_flight.store)
            if self._home is not in_flight.store:
                self._copy_from(in_flight.store)
            return
        if isinstance(in_flight, CopiedGather):
            if movable:
                self._move(None)
            self._copy_from(in_flight)
            in_flight.note(self._own.nbytes)
            return
        if isinstance(in_flight, SlotGatherInFlight):
            in_flight.wait()
            if movable:
                self._move(None if private else self._slot)
            if self._home is not self._slot:
                self._copy_from_slot()
            return
        if movable:
            self._move(None)
        if isinstance(in_flight, JoinedGather):
            in_flight.joint.land()
            return
        foreach_all_gather_copy_out(in_flight, self._full(in_flight))

    def joinable(self, lane: GatherLane) -> PlainContents | None:
        """Returns itself if it is packed and lands in private memory, as its last gather was."""
        packed = self.layout is self._packed and self._asked is lane.comm and self._slot is None
        return self if packed and self._home is None else None

    def make_room(self) -> Sequence[torch.Tensor]:
        """Returns the tensors that a gather of several groups fills, which have memory now."""
        self._own.allocate()
        return self._own.fills

    def _full(self, in_flight: AllGatherInFlight) -> FullTensors:
        """Returns what to fill, which has its memory: the same for all gathers of a layout."""
        self._make_room_at_home()
        if self._home is not None:  # a collective that was replaced in the middle of a step
            return FullTensors(self.fills, in_flight.layout, in_flight.lane)
        full = self._filled.get(in_flight.layout)
        if full is None:
            full = FullTensors(self.fills, in_flight.layout, in_flight.lane)
            self._filled[in_flight.layout] = full
        return full

    def _copy_from_slot(self) -> None:
        assert self._slot is not None, "something was gathered there"
        self._copy_from(self._slot)
        self._leave_slot()

    def _make_room_at_home(self) -> None:
        """Gets memory that this rank alone writes to, where the parameters lie."""
        if self._home is None:
            self._own.allocate()
        elif isinstance(self._home, SlotStore):
            self._home.move_out()

    @torch.no_grad()
    def _copy_from(self, store: SlotStore | AliasStore | CopiedGather) -> None:
        self._make_room_at_home()
        foreach_copy(list(self.fills), list(store.fills))

    def _move(self, home: SlotStore | AliasStore | None) -> None:
        if home is self._home:
            return
        self._own.put_params(None if home is None else home.seen)
        self._home = home

    def put_back(self) -> None:
        """Makes the parameters lie where they lay before a user moved them."""
        self._own.put_params(None if self._home is None else self._home.seen)

    def take_private(self, *, movable: bool) -> None:
        """Copies from the slot, or from the shards, if that is where they are."""
        home = self._home
        if isinstance(home, AliasStore):
            self._move(None)
            self._copy_from(home)
        elif movable and home is not None and home is self._slot:
            self._move(None)
            self._copy_from_slot()

    def _leave_slot(self) -> None:
        if self._occupied and self._slot is not None:
            self._occupied = False
            self._slot.leave()

    def free(self) -> None:
        """Frees private memory; lets the others gather anew in the slot."""
        if self._occupied:
            self._leave_slot()
        elif isinstance(self._home, SlotStore):
            self._home.leave()
        self._own.free()
