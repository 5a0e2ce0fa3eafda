"""Receives the slices of a consumer of an engine from trainer ranks.

Owns the consumer's side of [Note: slices], which needs no model and no default process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.engines.links import (
    LinkError,
    receive,
    receive_number,
    send_number,
)
from fullshard.checkpoint.engines.slice_sender import ASK, GIVE, GO, LOST, STOP
from fullshard.checkpoint.files.headers import DTYPE_NAMES

__all__ = ["SliceReceiver"]

_Part = tuple[int, Box]  # of which tensor, and which part of the slice
_Buckets = list[dict[int, list[_Part]]]

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class SliceReceiver:
    """The consumer's side of slices of a model in training.

    Attributes:
        consumer: this one's number.
        received: bytes of weights that came in the last update.
    """

    def __init__(self, init_info: Mapping[str, Any], link: dist.ProcessGroup) -> None:
        """Read the plan.

        Args:
            init_info: what ``SliceSender.init_info`` returned.
            link: of trainer ranks and consumers, as ``connect_engine`` returns it.

        Raises:
            ValueError: if ``init_info`` is of another version, or ``link`` has other processes.
        """
        if init_info.get("version") != 1:
            raise ValueError(
                f"init_info has version {init_info.get('version')!r}, and this fullshard knows 1; "
                "install one version of fullshard for trainers and consumers"
            )
        self._link = link
        trainers, consumers = init_info["trainers"], init_info["consumers"]
        self.consumer = link.rank() - trainers
        if link.size() != trainers + len(consumers) or self.consumer < 0:
            raise ValueError(
                f"the link has {link.size()} processes and this is its rank {link.rank()}, but "
                f"there are {trainers} trainer ranks and {len(consumers)} consumers; connect "
                "trainer ranks first, in order, then consumers"
            )
        tensors, mine = init_info["tensors"], consumers[self.consumer]
        self._names = [each["name"] for each in tensors]
        self._dtypes = [_DTYPES[each["dtype"]] for each in tensors]
        self._boxes = {at: Box(tuple(start), tuple(size)) for at, start, size in mine["slices"]}
        self._buckets: _Buckets = [
            {
                int(source): [(at, Box(tuple(start), tuple(size))) for at, start, size in parts]
                for source, parts in bucket.items()
            }
            for bucket in mine["buckets"]
        ]
        self.received = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the slice of each tensor of one update, on the CPU.

        Trainer ranks learn of a consumer that leaves the loop early, and raise.

        Raises:
            LinkError: if a trainer rank was lost, or could not send.
        """
        self.received = 0
        left = [dict(bucket) for bucket in self._buckets]
        come = {at for bucket in left for parts in bucket.values() for at, _ in parts}
        empty = [at for at in self._boxes if at not in come]
        try:
            while left:
                yield from self._bucket(left)
            for at in empty:  # slices without elements
                yield self._names[at], self._memory(at)
        except LinkError:
            self._stop(left, LOST)
            raise
        finally:
            self._stop(left, STOP)

    def _bucket(self, left: _Buckets) -> Iterator[tuple[str, torch.Tensor]]:
        """Ask for the first bucket of ``left``, remove it, and yield its slices."""
        bucket = left[0]
        slices = {
            at: self._memory(at)
            for at in sorted({at for parts in bucket.values() for at, _ in parts})
        }
        failed: LinkError | None = None
        asked = []
        left.pop(0)
        for source in bucket:
            try:
                self._guarded(left, source, send_number, GO, source, ASK)
                asked.append(source)
            except LinkError as error:
                failed = failed or error
        for source in asked:  # all of them, so that none waits for this consumer
            try:
                self._fill(slices, bucket[source], self._message(left, source, bucket[source]))
            except LinkError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        for at in list(slices):
            yield self._names[at], slices.pop(at)

    def _fill(
        self, slices: dict[int, torch.Tensor], parts: Sequence[_Part], message: torch.Tensor
    ) -> None:
        start = 0
        for at, box in parts:
            nbytes = box.numel * self._dtypes[at].itemsize
            flat = message[start : start + nbytes].clone().view(self._dtypes[at])
            box.of(slices[at]).copy_(flat.view(box.size))
            start += nbytes

    def _message(self, left: _Buckets, source: int, parts: Sequence[_Part]) -> torch.Tensor:
        """Return the bytes of ``parts`` as they come from ``source``."""
        length = self._guarded(left, source, receive_number, source, GIVE)
        nbytes = sum(box.numel * self._dtypes[at].itemsize for at, box in parts)
        message = torch.empty(length or nbytes, dtype=torch.uint8)
        self._guarded(left, source, receive, message, source, GIVE)
        if length:
            _forget(left, source)
            text = bytes(message.tolist()).decode()
            raise LinkError(f"trainer rank {source} could not send its part of the slices: {text}")
        self.received += nbytes
        return message

    def _memory(self, at: int) -> torch.Tensor:
        return torch.empty(self._boxes[at].size, dtype=self._dtypes[at])

    def _guarded(
        self,
        left: _Buckets,
        source: int,
        call: Any,
        *arguments: Any,
    ) -> Any:
        """Return ``call(link, *arguments)``; name the trainer rank that was lost."""
        try:
            return call(self._link, *arguments)
        except RuntimeError as error:
            _forget(left, source)
            raise LinkError(f"trainer rank {source} was lost: {error}") from error

    def _stop(self, left: _Buckets, why: int) -> None:
        """Send ``why`` to the trainer ranks that wait for a request."""
        for source in sorted({source for bucket in left for source in bucket}):
            try:
                send_number(self._link, why, source, ASK)
            except RuntimeError:  # it was lost, too
                continue
        left.clear()


def _forget(left: _Buckets, source: int) -> None:
    """Expect nothing more of ``source``."""
    for bucket in left:
        bucket.pop(source, None)
