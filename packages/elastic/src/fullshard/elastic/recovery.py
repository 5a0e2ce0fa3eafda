"""The state of a run, sent by a group that trains on to the groups that join.

Owns the messages between a rank that sends and one that receives: the sender's structure and boxes,
the receiver's requests, then the parts. A receiver takes each part of a tensor once, from ranks of
one group, which may be cut over another number of ranks. The transfer runs in a thread of its
own. Refuses: knowing what a tensor is for.
"""

from __future__ import annotations

import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from fullshard.checkpoint.spi import Box
from fullshard.elastic.compat import end_of
from fullshard.elastic.errors import ReplicaGroupError
from fullshard.elastic.links import connected
from fullshard.elastic.membership import Roster
from fullshard.elastic.state import ReplicaState, Tensors

__all__ = ["Received", "Recovery"]

_TAG = 7


class Received:
    """A state that arrived: its structure and the parts that this rank needs."""

    def __init__(self, structure: Any, parts: list[torch.Tensor]) -> None:
        self.structure = structure
        self.parts = parts


class Recovery:
    """Sends or receives a state, at most one at a time.

    Args:
        rank: of this process in its group.
        timeout: seconds that a message may take.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fullshard-recovery")

    def close(self) -> None:
        """End the thread, after what it does now."""
        self._thread.shutdown()

    def send(self, roster: Roster, store: dist.Store, state: tuple[Any, Tensors]) -> Future[None]:
        """Begin to send a copy of this rank's state to the groups that this group is the source of.

        Args:
            roster: the groups.
            store: in which they meet.
            state: the export; it must stay unchanged.
        """

        def work() -> None:
            link = _Link(roster, store, roster.own, self._rank, self._timeout)
            try:
                receivers = range(roster.members[roster.own].ranks, link.size)
                for at in receivers:
                    link.put((state[0], [box for _, box in state[1]]), at)
                for at in receivers:
                    _send_parts(link, at, state[1])
            finally:
                link.close()

        return self._thread.submit(work)

    def receive(self, roster: Roster, store: dist.Store, state: ReplicaState) -> Future[Received]:
        """Begin to receive this rank's part of the state of the source of its group."""
        state.look()

        def work() -> Received:
            source = roster.sources[roster.own]
            link = _Link(roster, store, source, self._rank, self._timeout)
            try:
                return _receive_parts(link, roster.members[source].ranks, self._rank, state)
            finally:
                link.close()

        return self._thread.submit(work)


class _Link:
    """Messages between the ranks of a source and the ranks of its receivers.

    The ranks of the source come first, then those of each group in the order of groups.
    """

    def __init__(
        self, roster: Roster, store: dist.Store, source: int, rank: int, timeout: float
    ) -> None:
        served = [at for at in sorted(roster.sources) if roster.sources[at] == source]
        order = [source, *served]
        first = 0
        for at in order:
            if at == roster.own:
                own = first + rank
            first += roster.members[at].ranks
        self.size = first
        self._group: dist.ProcessGroup = connected(store, f"state{source}", own, first, timeout)

    def close(self) -> None:
        end_of(self._group)

    def put(self, value: Any, at: int) -> None:
        """Send an object to rank ``at``."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._group.send([torch.tensor([data.numel()])], at, _TAG).wait()
        self._group.send([data], at, _TAG).wait()

    def get(self, at: int) -> Any:
        """Return an object that rank ``at`` sent."""
        length = torch.zeros(1, dtype=torch.int64)
        self._group.recv([length], at, _TAG).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        self._group.recv([data], at, _TAG).wait()
        return pickle.loads(data.numpy().tobytes())

    def move(self, tensors: list[torch.Tensor], at: int, *, sends: bool) -> list[dist.Work]:
        """Begin to send the contiguous ``tensors`` to rank ``at``, or to fill them from it."""
        call = self._group.send if sends else self._group.recv
        flat = [each.reshape(-1).view(torch.uint8) for each in tensors if each.numel()]
        return [call([each], at, _TAG) for each in flat]


def _send_parts(link: _Link, at: int, tensors: Tensors) -> None:
    parts = []
    for index, box in link.get(at):
        tensor, held = tensors[index]
        parts.append(box.of(tensor, held).contiguous())
    for work in link.move(parts, at, sends=True):
        work.wait()


def _receive_parts(link: _Link, ranks: int, rank: int, state: ReplicaState) -> Received:
    told = [link.get(at) for at in range(ranks)]
    structure = told[0][0]
    wanted = state.wanted(structure)
    boxes = [each[1] for each in told]
    dtypes = state.dtypes(structure)
    parts = [torch.empty(box.size, dtype=dtype) for box, dtype in zip(wanted, dtypes, strict=True)]
    asked: list[list[tuple[int, Box]]] = [[] for _ in range(ranks)]
    for index, want in enumerate(wanted):
        left = want.numel
        taken: set[Box] = set()
        for turn in range(ranks):  # replicas hold equal boxes: each rank starts at another one
            at = (rank + turn) % ranks
            held = boxes[at][index]
            common = want.overlap(held)
            if left and common.numel and held not in taken:
                taken.add(held)
                left -= common.numel
                asked[at].append((index, common))
        if left:
            raise ReplicaGroupError(
                f"the source of the state holds only {want.numel - left} of {want.numel} elements "
                f"of tensor {index} that this rank needs; shard the model alike in all groups"
            )
    works: list[dist.Work] = []
    arriving: list[tuple[int, Box, torch.Tensor]] = []
    for at, requests in enumerate(asked):
        link.put(requests, at)
        came = [torch.empty(box.size, dtype=dtypes[index]) for index, box in requests]
        arriving += [(i, box, each) for (i, box), each in zip(requests, came, strict=True)]
        works += link.move(came, at, sends=False)
    for work in works:
        work.wait()
    for index, box, each in arriving:
        box.of(parts[index], wanted[index]).copy_(each)
    return Received(structure, parts)
