"""Which stream a backward's operations belong to, and what autograd synchronises by itself.

Owns what torch promises under "Stream semantics of backward passes" (docs, CUDA semantics): each
node runs on the stream of its forward; where an edge of the graph goes from one stream to another,
the second waits for the first; a backward begins after what the stream it was called on holds, and
when it ends that stream waits for those of the leaves. A backward on the CPU runs on the calling
thread, node by node. Therefore this module derives the order from the node that runs now.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fullshard.preflight.compat import WeakIdKeyDictionary, backward_node, forward_number

__all__ = ["GraphStreams"]

_LEAF = 2**63  # torch gives nodes of leaves the largest number there is


class _Stream(Protocol):
    """The part of a stream's interface that this module calls."""

    def wait_stream(self, stream: Any, /) -> None: ...


class GraphStreams:
    """Follows the nodes of backwards on one thread.

    Attributes:
        part: the node that runs now, as a key; None outside of a backward.
        stream: the stream of that node.
    """

    def __init__(self, default: _Stream) -> None:
        self.part: tuple[int, int] | None = None
        self.stream = default
        self._numbers: list[int] = [0]
        self._streams: list[_Stream] = [default]
        self._leaves = WeakIdKeyDictionary()
        self._next: list[_Stream] = []
        self._caller: _Stream = default
        self._ready: list[_Stream] = []
        self._ends: list[_Stream] = []

    def switched(self, stream: _Stream) -> None:
        """Record further operations of forward on ``stream``."""
        number = forward_number()
        if self._numbers[-1] == number:
            self._streams[-1] = stream
        else:
            self._numbers.append(number)
            self._streams.append(stream)

    def used(self, leaf: torch.Tensor, stream: _Stream) -> None:
        """Note that an operation of forward used a leaf: its gradient is added up there."""
        if leaf not in self._leaves:
            self._leaves[leaf] = stream

    def chose(self, stream: object) -> bool:
        """Whether a backward runs now, and a node of it on this stream."""
        return self.part is not None and stream is self.stream

    def is_idle(self) -> bool:
        """Whether no backward runs, nor ran when this was asked last."""
        return self.part is None and backward_node() is None

    def follow(self, caller: Callable[[], _Stream]) -> tuple[int, int] | None:
        """Look which node runs now, and orders streams as autograd does; return its key.

        Args:
            caller: returns the stream on which the backward was called.
        """
        node = backward_node()
        key = None if node is None else _key(node)
        if key == self.part:
            return key
        self._leave()
        if node is None:
            for stream in self._ends:
                self._wait(self._caller, stream)
            self._ready, self._ends = [], []
        else:
            if self.part is None:
                self._caller = caller()
            self._enter(node)
        self.part = key
        return key

    def _enter(self, node: Any) -> None:
        self.stream = stream = self._stream_of(node, self.stream)
        if stream not in self._ready:
            self._ready.append(stream)
            self._wait(stream, self._caller)
        following = [each for each, _ in node.next_functions if each is not None]
        self._next = [self._stream_of(each, stream) for each in following]
        if not following and stream not in self._ends:
            self._ends.append(stream)

    def _leave(self) -> None:
        for stream in self._next:
            if stream not in self._ready:
                self._ready.append(stream)
                self._wait(stream, self._caller)
            self._wait(stream, self.stream)
        self._next = []

    def _stream_of(self, node: Any, producer: _Stream) -> _Stream:
        number = int(node._sequence_nr())
        if number >= _LEAF:
            found: _Stream = self._leaves.get(getattr(node, "variable", None), producer)
            return found
        return self._streams[bisect.bisect_right(self._numbers, number) - 1]

    @staticmethod
    def _wait(stream: _Stream, other: _Stream) -> None:
        if stream is not other:
            stream.wait_stream(other)


def _key(node: Any) -> tuple[int, int]:
    """The identity of a node; the Python object may be another each time it is asked for."""
    return int(node._sequence_nr()), id(getattr(node, "variable", None))
