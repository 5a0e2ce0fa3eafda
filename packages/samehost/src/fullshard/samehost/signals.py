"""Passes messages between processes of one host through pipes, and waits for them.

Owns: a pipe from every rank to every other, the messages in it, and what ends a wait: the message,
the end of the other process, its failure message, or the timeout. Refuses: knowing what is in the
memory that the messages are about.

[Note: memory order] A rank writes to shared memory, then a message to a pipe; the other reads the
message, then the memory. The kernel guards a pipe by a lock that both system calls take, the writer
before the reader: whatever the writer stored before is visible to the reader after, on every
processor. No rank reads a flag in shared memory, so the order of loads and stores does not matter.

[Note: no hangs] One process holds the reading end of a pipe, and one other process the writing end.
When the other process ends, for any reason, the kernel closes its end and wakes the waiting
process. A child that it forked may hold a copy of the end, so the process itself is watched too,
where the kernel can. A rank that fails sends the reason to the other ranks before it closes its
pipes: each can name the culprit.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from fullshard.comm import PeerLostError

__all__ = [
    "FORMAT",
    "MOST_AHEAD",
    "SPANS",
    "Message",
    "MessageKind",
    "NoRoomError",
    "Peer",
    "SharedMemoryError",
]

MOST_AHEAD = 48
"""Collectives that a rank may be ahead of another: so many messages that fit into every pipe."""

SPANS = 0
"""Stands for a buffer where ranks say how many spans of large collectives they are done with."""

FORMAT = struct.Struct("<QQQQ")
"""Of a ``Message`` as it travels."""
_ENDED = contextlib.suppress(BrokenPipeError)  # a later wait for the peer raises
_LONGEST = 60.0  # seconds in one wait
_AT_FIRST = 0.05  # seconds before anybody asks how long to wait: most waits are over by then
_AT_ONCE = 4096  # bytes read at once, a multiple of a message's


class SharedMemoryError(RuntimeError):
    """Shared memory cannot be used among these ranks; raised on all of them."""


class NoRoomError(SharedMemoryError):
    """There is not enough memory for a collective; nothing was sent, and smaller ones go on."""


class MessageKind(IntEnum):
    """The kind of a message."""

    LEFT = 0
    """Only that the sender has left collectives; not numbered, as ``BUFFER_LEFT``."""
    GATHER = 1
    """The sender's part of a gather is in place; ``value`` bytes."""
    REDUCE = 2
    """The sender's parts of a reduction are in place; ``value`` bytes each."""
    OFFER = 3
    """A segment: descriptor ``value`` of the sender, inode ``detail``."""
    REFUSED = 4
    """No segment; error number ``value``."""
    MAPPED = 5
    """The segment is mapped; or not, with error number ``value``."""
    ENDED = 6
    """The sender has failed because rank ``value`` has ended, or was interrupted."""
    LATE = 7
    """The sender has failed because rank ``value`` did not come in time."""
    DIFFERS = 8
    """The sender has failed because rank ``value`` came to another collective."""
    BUFFER_LEFT = 9
    """The sender has left buffer ``value`` after its gather number ``detail``; not numbered.

    Of the pseudo-buffer ``SPANS`` it has left ``detail`` spans.
    """
    EXCHANGE = 10
    """The sender's part of an exchange is in place, in a region of ``value`` bytes."""
    ALL_REDUCE = 11
    """The sender's tensor of ``value`` bytes is in place, to be reduced by all."""


_FAILURES = {
    MessageKind.ENDED: "has ended, or was interrupted",
    MessageKind.LATE: "did not come in time",
    MessageKind.DIFFERS: "came to another collective",
}


class Message(NamedTuple):
    """A message from one rank to another.

    Attributes:
        kind: a ``MessageKind``.
        left: how many collectives the sender has left: it will not read their regions again.
        value: see ``MessageKind``.
        detail: see ``MessageKind``; of a collective, what else must be equal on all ranks.
    """

    kind: int
    left: int
    value: int
    detail: int


class Peer:
    """Another rank of a process group, as this one sees it.

    Attributes:
        rank: its rank in the default process group.
        process: its process id.
        left: how many collectives it is known to have left.
        messages: its numbered messages that were heard and not forgotten, by number.
    """

    def __init__(self, rank: int, process: int, inbox: int, outbox: int) -> None:
        """Take over the two descriptors: ``inbox`` to receive, ``outbox`` to send."""
        self.rank = rank
        self.process = process
        self.left = 0
        self._inbox = inbox
        self._outbox = outbox
        self._watch = _watch(process)
        self._poll = select.poll()
        for fd in (inbox, self._watch):
            if fd is not None:
                self._poll.register(fd, select.POLLIN)
        self.messages: dict[int, Message] = {}
        self._buffers_left: dict[int, int] = {}
        self._heard = 0
        self._failure: Message | None = None
        self._process_ended = False
        self._ended = False

    def send(self, packed: bytes) -> None:
        """Send a message. If the peer has ended, a later wait for it raises."""
        with _ENDED:
            os.write(self._outbox, packed)

    def has_message(self, number: int) -> bool:
        """Return whether message ``number`` is here or never will be, so that no wait is needed."""
        if not self.has_sent(number):
            self._listen()
        return self.has_sent(number) or self._ended or self._failure is not None

    def has_sent(self, number: int) -> bool:
        """Whether its message ``number`` was heard."""
        return self._heard > number

    def has_left_buffer(self, buffer: int, turns: int) -> bool:
        """Return whether the peer reported leaving a buffer after ``turns`` gathers there."""
        return self._buffers_left.get(buffer, 0) >= turns

    def wait(self, done: Callable[[Peer], bool], timeout: Callable[[], float]) -> None:
        """Return once ``done`` of this peer is true.

        Raises:
            PeerLostError: if it ended, failed, or did not say so in ``timeout()`` seconds.
        """
        began, patience = 0.0, _AT_FIRST
        while True:
            heard = self._listen()
            if done(self):
                return
            if self._failure is not None:
                kind, _, culprit, _ = self._failure
                why = _FAILURES[MessageKind(kind)]
                said = f"rank {culprit} {why}, says rank {self.rank}."
                raise PeerLostError(said, culprit, kind)
            if self._ended:
                raise PeerLostError(
                    f"rank {self.rank} (process {self.process}) has ended, or given up its process "
                    "group, while this rank waits for it. Look at what it said last.",
                    self.rank,
                    MessageKind.ENDED,
                )
            if heard:
                continue
            now = time.monotonic()
            began = began or now
            if now - began >= patience:
                patience = timeout()
            left = began + patience - now
            if left <= 0:
                raise PeerLostError(
                    f"rank {self.rank} (process {self.process}) did not come to a collective that "
                    f"this rank is in, for {patience:g} s, the timeout of the process group. If it "
                    "is only slow, use a longer timeout.",
                    self.rank,
                    MessageKind.LATE,
                )
            for fd, _ in self._poll.poll(min(left, _LONGEST) * 1000):
                self._process_ended = self._process_ended or fd == self._watch

    def _listen(self) -> bool:
        """Take in what has arrived, without waiting, and tell whether anything had."""
        try:
            data = os.read(self._inbox, _AT_ONCE)
        except BlockingIOError:
            # If the process had ended before this read, its last message was read by now.
            self._ended = self._ended or self._process_ended
            return False
        if not data:
            self._ended = True
            return False
        for kind, left, value, detail in FORMAT.iter_unpack(data):
            if left > self.left:
                self.left = left
            if kind == MessageKind.BUFFER_LEFT:
                self._buffers_left[value] = detail
            elif kind in _FAILURES:
                self._failure = Message(kind, left, value, detail)
            elif kind != MessageKind.LEFT:
                self.messages[self._heard] = Message(kind, left, value, detail)
                self._heard += 1
        return True

    def close(self) -> None:
        """Close the descriptors: it hears that this rank has gone."""
        for fd in (self._inbox, self._outbox, self._watch):
            if fd is not None:
                os.close(fd)


def _watch(process: int) -> int | None:
    """A descriptor that is readable once ``process`` has ended; None where there is no such."""
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(process)
    return None
