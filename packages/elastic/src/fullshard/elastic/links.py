"""The connections of one rank to ranks of other groups, for one quorum.

Owns the meeting of groups in the quorum's store, the process groups between them, and the messages,
in host memory: pieces of a reduction, operations, numbers of a group. An error closes the
connections, so that the other ranks notice at once. Refuses: deciding what an error means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import Layout
from fullshard.comm.spi import SeveralWorks, exchange
from fullshard.elastic.compat import end_of
from fullshard.elastic.errors import ReplicaGroupError
from fullshard.elastic.membership import Member, Quorum, Roster
from fullshard.elastic.pieces import Peer, copied_into, packed, packed_numel

__all__ = ["STEP_END", "Links", "connected", "meet"]

STEP_END = "the end of the step"
_CONTROL = 1  # the tag of operations and numbers; pieces of a reduction have another one
_OPERATION = 160  # bytes of the text of an operation: messages of one size


def meet(quorum: Quorum, own: Member, rank: int, timeout: float) -> tuple[Roster, dist.Store]:
    """Return the roster of ``quorum`` and the store of its groups.

    Args:
        quorum: what the coordinator gave.
        own: the description of this group.
        rank: of this process in its group; rank 0 tells.
        timeout: seconds to wait for the others.
    """
    host, _, port = quorum.store.rpartition(":")
    patience = timedelta(seconds=timeout)
    client = dist.TCPStore(
        host, int(port), is_master=False, wait_for_workers=False, timeout=patience
    )
    store = dist.PrefixStore(f"fullshard/{quorum.key}", client)
    if rank == 0:
        store.set(f"member/{quorum.own}", json.dumps(asdict(own)))
    told = [store.get(f"member/{at}") for at in range(len(quorum.names))]
    members = tuple([Member(**json.loads(each)) for each in told])
    return Roster(quorum=quorum, members=members, own=quorum.own), store


class Links:
    """The connections of a rank for one quorum.

    If all groups have equal numbers of ranks, a rank is connected to the ranks of its own number;
    otherwise to all ranks.

    Args:
        roster: the groups.
        store: in which they meet.
        rank: of this process in its group.
        timeout: seconds that a message may take.

    Attributes:
        peers: the connected ranks, as (place of the group, rank in the group), with this rank.
    """

    def __init__(self, roster: Roster, store: dist.Store, rank: int, timeout: float) -> None:
        sizes = [member.ranks for member in roster.members]
        self.roster = roster
        self._here = Peer(rank, sizes[roster.own])
        self.peers: list[tuple[int, int]]
        if len(set(sizes)) == 1:
            lane, self.peers = f"lane{rank}", [(at, rank) for at in range(len(sizes))]
        else:
            lane, self.peers = (
                "all",
                [(at, q) for at, size in enumerate(sizes) for q in range(size)],
            )
        self._others = [at for at, (place, _) in enumerate(self.peers) if place != roster.own]
        self._sizes = sizes
        self._process_group: dist.ProcessGroup | None = None
        if len(self.peers) > 1:
            own = self.peers.index((roster.own, rank))
            self._process_group = connected(store, lane, own, len(self.peers), timeout)

    def close(self) -> None:
        """Close the connections; ranks that wait for this one get an error."""
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            end_of(process_group)

    def _peer(self, at: int) -> Peer:
        place, rank = self.peers[at]
        return Peer(rank, self._sizes[place])

    def _exchange(self, sent: Sequence[torch.Tensor], came: Sequence[torch.Tensor]) -> None:
        if len(self.peers) > 1:
            exchange(sent, came, self._connection(), False)

    def _connection(self) -> dist.ProcessGroup:
        if self._process_group is None:
            raise ConnectionError("the connections to other groups were closed")
        return self._process_group

    def contributions(
        self, output: torch.Tensor, layout: Layout, sent_as: torch.dtype
    ) -> list[torch.Tensor]:
        """Return, per contributing group, its gradients for this rank's slice, in their order.

        Args:
            output: this rank's slice of its group's reduction, on the CPU.
            layout: of the slice.
            sent_as: the dtype that travels; this group's own gradients are rounded to it, too.
        """
        contributors, here = self.roster.contributors, self._here
        nothing = output.new_empty(0, dtype=sent_as)
        sent = [nothing] * len(self.peers)
        came = [nothing] * len(self.peers)
        for at, (place, _) in enumerate(self.peers):
            if place == self.roster.own:
                continue
            there = self._peer(at)
            if self.roster.own in contributors:
                sent[at] = packed(output, layout, here, there, sent_as)
            if place in contributors:
                numel = packed_numel(layout, here, there)
                came[at] = output.new_empty(numel, dtype=sent_as)
        self._exchange(sent, came)
        parts = []
        for place in contributors:
            if place == self.roster.own:
                parts.append(output if sent_as is output.dtype else output.to(sent_as))
            elif self._sizes[place] == here.ranks:
                parts.append(came[self.peers.index((place, here.rank))])
            else:
                parts.append(self._assembled(output, layout, place, came))
        return parts

    def _assembled(
        self, output: torch.Tensor, layout: Layout, place: int, came: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the slice of a group with other numbers of ranks, from all that they sent."""
        whole = torch.zeros_like(output)
        for at, (group, _) in enumerate(self.peers):
            if group == place:
                copied_into(whole, came[at], layout, self._here, self._peer(at))
        return whole

    def require_same(self, operation: str) -> None:
        """Compare what all connected ranks do next; gloo ends a process where sizes differ.

        Args:
            operation: what this rank does, in words.

        Raises:
            RuntimeError: on all connected ranks, if a rank is at ``STEP_END`` before others.
            ReplicaGroupError: on all connected ranks, if a rank does another operation.
        """
        text = operation.encode()[:_OPERATION].ljust(_OPERATION)
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        came = {at: torch.empty_like(mine) for at in self._others}
        self._control(dict.fromkeys(self._others, mine), came)
        theirs = {at: bytes(e.tolist()).decode(errors="replace").rstrip() for at, e in came.items()}
        others = [at for at, each in came.items() if not torch.equal(each, mine)]
        if not others:
            return
        place, rank = self.peers[others[0]]
        told = (
            f"replica group {self.roster.members[self.roster.own].name} is at {operation}, and "
            f"rank {rank} of replica group {self.roster.members[place].name} is at "
            f"{theirs[others[0]]}"
        )
        if STEP_END in (operation, *theirs.values()):  # a backward that raised reduces less
            raise RuntimeError(told)
        raise ReplicaGroupError(
            f"{told}; all groups must reduce the same modules in the same order. For modules that "
            "a group may skip, call model.set_schedule(CanonicalOrder()) in all groups"
        )

    def from_contributors(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the ``values`` of one rank per contributing group, in the order of groups.

        The values must be equal on all ranks of a group.
        """
        contributors, here = self.roster.contributors, self._here
        mine = self.roster.own in contributors
        sent: dict[int, torch.Tensor] = {}
        came: dict[int, torch.Tensor] = {}
        for at in self._others:
            place, rank = self.peers[at]
            if mine and rank % here.ranks == here.rank:
                sent[at] = values
            if place in contributors and here.rank % self._sizes[place] == rank:
                came[at] = torch.empty_like(values)
        self._control(sent, came)
        arrived = {self.peers[at][0]: each for at, each in came.items()}
        arrived[self.roster.own] = values
        return [arrived[place] for place in contributors]

    def _control(self, sent: Mapping[int, torch.Tensor], came: Mapping[int, torch.Tensor]) -> None:
        """Send and receive small messages, by the index of the peer."""
        if not self._others:
            return
        group = self._connection()
        asked = [group.recv([each], at, _CONTROL) for at, each in came.items() if each.numel()]
        given = [group.send([each], at, _CONTROL) for at, each in sent.items() if each.numel()]
        SeveralWorks([*asked, *given]).wait()


def connected(
    store: dist.Store, name: str, rank: int, size: int, timeout: float
) -> dist.ProcessGroup:
    """Return a process group over gloo of the ranks that meet in ``store`` under ``name``.

    The call returns once all ranks are connected. gloo alone returns when this rank is, and an
    early rank that closed its connections then would fail the connecting of a late one. The group
    is not registered with ``torch.distributed``: it lives as long as a reference to it.
    """
    place = dist.PrefixStore(name, store)
    made: Any = dist.ProcessGroupGloo(place, rank, size, timedelta(seconds=timeout))
    process_group: dist.ProcessGroup = made  # a backend, which has the same messages
    process_group.barrier().wait()
    return process_group
