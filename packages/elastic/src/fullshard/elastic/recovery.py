"""The state of a run, sent by a group that trains on to the groups that join.

Owns the messages between a rank that sends and one that receives: the sender's structure and boxes,
the receiver's requests, the parts, and their checksum. A receiver takes each part of a tensor once,
from ranks of one group, which may be cut over another number of ranks. A transfer runs in its own
thread. Refuses: knowing what a tensor is for.

[Note: abandoned transfers] A transfer of a dropped step may wait for a lost rank until its
time-out. The transfer of the next step must not wait behind it: its other ranks would give up
before it begins, and so on in each step. Therefore a new step closes the old transfer, and frees
its state.
"""

from __future__ import annotations

import logging
import pickle
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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

_log = logging.getLogger("fullshard.elastic")
_TAG = 7
_THREADS = 64  # abandoned transfers that may still wait for a connection


class Received:
    """A state that arrived: its structure and the parts that this rank needs."""

    def __init__(self, structure: Any, parts: list[torch.Tensor]) -> None:
        self.structure = structure
        self.parts = parts


class _Transfer:
    """A transfer in a thread; ``end``, from another thread, makes it fail."""

    def __init__(self, state: tuple[Any, Tensors] | None = None) -> None:
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._is_ended = False
        self.state = state

    @contextmanager
    def over(self, link: _Link) -> Iterator[_Link]:
        """Use a connection, and close it."""
        with self._lock:
            self._link = link
        if self._is_ended:
            self.end()
        try:
            yield link
        finally:
            self.end()

    def end(self) -> None:
        """Close the connection if there is one, and free the state."""
        with self._lock:
            self._is_ended, self.state = True, None
            link, self._link = self._link, None
        if link is not None:
            link.close()


class Recovery:
    """Sends or receives a state; a transfer begins when those before it were ended.

    Args:
        rank: of this process in its group.
        timeout: seconds that a message may take.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fullshard-recovery")
        self._transfer: _Transfer | None = None

    def end(self) -> None:
        """End the transfer of the last step; see [Note: abandoned transfers]."""
        if self._transfer is not None:
            self._transfer.end()
            self._transfer = None

    def close(self) -> None:
        """End the transfer and the threads."""
        self.end()
        self._threads.shutdown()

    def send(self, roster: Roster, store: dist.Store, state: tuple[Any, Tensors]) -> None:
        """Begin to send a copy of this rank's state to the groups that this group is the source of.

        Args:
            roster: the groups.
            store: in which they meet.
            state: the export; it must stay unchanged.
        """
        transfer = self._transfer = _Transfer(state)

        def work() -> None:
            made = _Link(roster, store, roster.own, self._rank, self._timeout)
            with transfer.over(made) as link:
                if transfer.state is None:
                    return
                structure, tensors = transfer.state
                receivers = range(roster.members[roster.own].ranks, link.size)
                for at in receivers:
                    link.put((structure, [box for _, box in tensors]), at)
                for at in receivers:
                    _send_parts(link, at, tensors)

        def logged() -> None:
            try:
                work()
            except Exception as error:  # the receivers drop the step
                _log.warning("rank %d sent no state: %s: %s", self._rank, type(error), error)

        self._threads.submit(logged)

    def receive(self, roster: Roster, store: dist.Store, state: ReplicaState) -> Future[Received]:
        """Begin to receive this rank's part of the state of the source of its group."""
        state.look()
        transfer = self._transfer = _Transfer()

        def work() -> Received:
            source = roster.sources[roster.own]
            made = _Link(roster, store, source, self._rank, self._timeout)
            with transfer.over(made) as link:
                return _receive_parts(link, roster.members[source].ranks, self._rank, state)

        return self._threads.submit(work)


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
        made = connected(store, f"state{source}", own, first, timeout)
        self._group: dist.ProcessGroup | None = made

    def close(self) -> None:
        """Close the connections, which needs that no reference to the process group is left."""
        process_group, self._group = self._group, None
        if process_group is not None:
            end_of(process_group)

    def _connection(self) -> dist.ProcessGroup:
        if self._group is None:
            raise ConnectionError("the connections of a transfer were closed")
        return self._group

    def put(self, value: Any, at: int) -> None:
        """Send an object to rank ``at``."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._connection().send([torch.tensor([data.numel()])], at, _TAG).wait()
        self._connection().send([data], at, _TAG).wait()

    def get(self, at: int) -> Any:
        """Return an object that rank ``at`` sent."""
        length = torch.zeros(1, dtype=torch.int64)
        self._connection().recv([length], at, _TAG).wait()
        data = torch.empty(int(length), dtype=torch.uint8)
        self._connection().recv([data], at, _TAG).wait()
        return pickle.loads(data.numpy().tobytes())

    def move(self, tensors: list[torch.Tensor], at: int, *, sends: bool) -> list[dist.Work]:
        """Begin to send the contiguous ``tensors`` to rank ``at``, or to fill them from it."""
        group = self._connection()
        call = group.send if sends else group.recv
        flat = [each.reshape(-1).view(torch.uint8) for each in tensors if each.numel()]
        return [call([each], at, _TAG) for each in flat]


def _send_parts(link: _Link, at: int, tensors: Tensors) -> None:
    parts = []
    for index, box in link.get(at):
        tensor, held = tensors[index]
        parts.append(box.of(tensor, held).contiguous())
    for work in link.move(parts, at, sends=True):
        work.wait()
    link.put(_checksum(parts), at)


def _checksum(tensors: Sequence[torch.Tensor]) -> int:
    found = 0
    for each in tensors:
        found = zlib.crc32(each.reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def _receive_parts(link: _Link, ranks: int, rank: int, state: ReplicaState) -> Received:
    told = [link.get(at) for at in range(ranks)]
    structure = told[0][0]
    state.require_fits(structure)
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
    arriving: list[list[torch.Tensor]] = []
    for at, requests in enumerate(asked):
        link.put(requests, at)
        came = [torch.empty(box.size, dtype=dtypes[index]) for index, box in requests]
        arriving.append(came)
        works += link.move(came, at, sends=False)
    for work in works:
        work.wait()
    for at, came in enumerate(arriving):
        if _checksum(came) != link.get(at):
            raise ConnectionError(f"the state from rank {at} of the source changed on its way")
        for (index, box), each in zip(asked[at], came, strict=True):
            box.of(parts[index], wanted[index]).copy_(each)
    return Received(structure, parts)
