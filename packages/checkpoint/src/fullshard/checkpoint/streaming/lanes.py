"""Buckets on their way to one rank: requested by that rank, sent by the ranks with parts.

Owns the messages of a lane. [Note: lanes] Each rank that gets parameters has a lane of its own: it
requests one bucket after another from the ranks that hold parts, at its own pace. On each of these
ranks a thread answers. Therefore a slow or waiting consumer blocks no other consumer. A rank
without a consumer answers independently of its own program. A request is a number: go on, or stop.
An answer begins with a number, the length of an error's text; without one, the bytes follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fullshard.checkpoint.agreement import format_error
from fullshard.checkpoint.streaming.handover import Full, Handover
from fullshard.checkpoint.streaming.plan import Piece, Streamed, pieces_for
from fullshard.checkpoint.streaming.shards import PinnedShards, memory
from fullshard.sharding import RankMismatchError

__all__ = ["Bucket", "answer", "receive"]

Bucket = Sequence[Streamed]

_REQUEST, _ANSWER = 1, 2  # tags: a pair of ranks may be in each other's lanes
_GO, _STOP = 1, 0


def answer(
    buckets: Sequence[Bucket],
    shards: PinnedShards,
    group: dist.ProcessGroup,
    rank: int,
    to: int,
) -> None:
    """Send rank ``to`` what it gets from this one, ``rank``, as it asks for it.

    Raises:
        Exception: what kept this rank from sending; ``to`` is told.
        RuntimeError: if ``to`` was lost.
    """
    going_on = True
    for bucket in buckets:
        pieces = pieces_for(bucket, to).get(rank, ())
        if pieces and going_on:
            going_on = _received(group, to, _REQUEST) == _GO
            if going_on:
                _send_message(pieces, shards, group, to)
        shards.release(bucket, to)


def _send_message(
    pieces: Sequence[Piece], shards: PinnedShards, group: dist.ProcessGroup, to: int
) -> None:
    try:
        message = shards.message(pieces)
    except Exception as error:
        text = torch.frombuffer(bytearray(format_error(error).encode()), dtype=torch.uint8)
        _send(torch.tensor([text.numel()]), group, to, _ANSWER)
        _send(text, group, to, _ANSWER)
        raise
    _send(torch.tensor([0]), group, to, _ANSWER)
    _send(message, group, to, _ANSWER)


def receive(
    buckets: Sequence[Bucket],
    shards: PinnedShards,
    group: dist.ProcessGroup | None,
    rank: int,
    handover: Handover,
) -> None:
    """Pass all buckets to this rank's consumer, until the consumer stops.

    Raises:
        RankMismatchError: if a rank could not send.
        Exception: what kept this rank from receiving.
        RuntimeError: if a rank was lost.
    """
    asked = [pieces_for(bucket, rank) for bucket in buckets]
    for each in asked:
        each.pop(rank, None)
    with _stopped_at_the_end(asked, group):
        for bucket in buckets:
            if not handover.wait_for_room():
                break
            handover.put(_bucket(bucket, asked, shards, group))
            shards.release(bucket, rank)


_Asked = list[dict[int, list[Piece]]]


@contextmanager
def _stopped_at_the_end(asked: _Asked, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Tell the ranks in ``asked``, which wait for a request, to stop, also after an exception."""
    try:
        yield
    finally:
        waiting = {source for messages in asked for source in messages}
        for source in sorted(waiting):
            assert group is not None, "others have parts"
            _send(torch.tensor([_STOP]), group, source, _REQUEST)


def _bucket(
    bucket: Bucket, asked: _Asked, shards: PinnedShards, group: dist.ProcessGroup | None
) -> Full:
    """Return the whole parameters of ``bucket``, the next one that is asked for."""
    full = {param.name: memory(param.shape, param.dtype) for param in bucket}
    messages = {source: memory((p[-1].end,), torch.uint8) for source, p in asked[0].items()}
    for param in bucket:
        shards.fill(full[param.name], param)
    pieces_of = asked.pop(0)
    for source in pieces_of:
        assert group is not None, "others have parts"
        _send(torch.tensor([_GO]), group, source, _REQUEST)
    failed = ""
    works = []
    for source, message in messages.items():
        assert group is not None, "others have parts"
        length = _received(group, source, _ANSWER)
        if length:
            text = memory((length,), torch.uint8)
            dist.recv(text, source, group=group, tag=_ANSWER)
            failed = f"rank {source}: {bytes(text.tolist()).decode()}"
            for later in asked:  # it has ended
                later.pop(source, None)
        else:
            works.append(dist.irecv(message, source, group=group, tag=_ANSWER))
    for work in works:
        assert work is not None, "this rank is in the process group"
        work.wait()
    if failed:
        raise RankMismatchError(f"the stream of full parameters has ended, as {failed}")
    for source, message in messages.items():
        for piece in pieces_of[source]:
            piece.box.of(full[piece.param.name]).copy_(piece.in_message(message))
    return full


def _send(tensor: torch.Tensor, group: dist.ProcessGroup, to: int, tag: int) -> None:
    dist.send(tensor, to, group=group, tag=tag)


def _received(group: dist.ProcessGroup, source: int, tag: int) -> int:
    number = torch.zeros(1, dtype=torch.int64)
    dist.recv(number, source, group=group, tag=tag)
    return int(number)
