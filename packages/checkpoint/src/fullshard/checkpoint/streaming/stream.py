"""Stream the full parameters of a sharded model, bucket by bucket, during training.

Owns the thread that exchanges buckets, the order of its collectives, and how a stream ends early.

[Note: a stream during training] The stream and training share only the host. The values are pinned
by a copy: each rank copies its shards to the CPU before ``iter_full`` returns. Therefore the next
optimizer step does not wait, and all parameters of the stream belong to one step. The alternative,
an optimizer step that waits until the stream has read the shards, costs no copy, but a consumer
that waits for training would then wait for ever. Messages go over a gloo process group of the
stream's own, in threads of its own: a rank inside a collective of training still sends its parts.
So ranks may reach both in any order, and no kernel of an accelerator is involved.

[Note: ending a stream] Ranks agree once, at the beginning, that they were called alike: within the
call, on the stream's process group and over the model's meshes: ranks would wait forever for a rank
with another group; on the rest in the stream's threads. After that each consumer is by itself; see
[Note: lanes]. A rank may leave early, by ``break`` or an exception, or when its thread ends. The
rank then stops the sending ranks. A process that ends while a stream is under way sends its parts
first: the threads are no daemons.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.agreement import agree_over
from fullshard.checkpoint.names import ParamNames
from fullshard.checkpoint.process_groups import ranks_of
from fullshard.checkpoint.streaming.background import check_params, group_for, start_after
from fullshard.checkpoint.streaming.handover import Handover
from fullshard.checkpoint.streaming.lanes import answer, receive
from fullshard.checkpoint.streaming.plan import Streamed, buckets_of, streamed
from fullshard.checkpoint.streaming.shards import PinnedShards
from fullshard.sharding.spi import Comparison

__all__ = ["ParameterStream", "checked_targets", "iter_full", "stream_of"]

_BUCKET_BYTES = 64 * 2**20
_CPU = torch.device("cpu")

_STREAM = Comparison(
    what="the agreement on a stream of full parameters",
    error="the stream of full parameters has ended, as some ranks found an error; ",
    mismatch="ranks disagree on the stream of full parameters: ",
    advice="Call iter_full() on every rank with the same model and the same arguments",
)


class ParameterStream(
    Iterator[tuple[str, torch.Tensor]], AbstractContextManager["ParameterStream", None]
):
    """An iterator over names and full parameters, made by ``iter_full``.

    Used in a ``with`` statement it is closed at the end of the block.
    """

    def __init__(self, handover: Handover, thread: threading.Thread) -> None:
        """Start to consume the buckets that ``thread`` produces."""
        self._handover = handover
        self._thread = thread
        self._bucket: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._finalizer = weakref.finalize(self, handover.leave)
        self._finalizer.atexit = False  # a consumer that has ended is noticed anyway

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Return the next name and parameter.

        Raises:
            RankMismatchError: on every rank, if ranks disagree or a rank failed.
            RuntimeError: if a rank was lost.
        """
        for named in self._bucket:
            return named
        self._bucket = iter(())  # lets go of the last one before the next is waited for
        full = self._handover.take()
        if full is None:
            raise StopIteration
        self._bucket = _emptied(full)
        return next(self)

    def close(self) -> None:
        """End this rank's part: nothing more comes here; others go on if they want to."""
        self._bucket = iter(())
        self._handover.leave()

    def wait(self) -> None:
        """Return once this rank has done its part; before a process group is destroyed, say.

        On a rank that gets parameters, all were taken by then, or the stream was closed.

        Raises:
            RankMismatchError: on every rank, if ranks disagree or a rank failed.
            RuntimeError: if a rank was lost.
        """
        self._thread.join()
        self._handover.require_no_error()

    def __exit__(self, *error: object) -> None:
        """Close the stream."""
        self.close()


def _emptied(full: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield and remove the entries of ``full``, so that the consumer alone keeps them alive."""
    for name in list(full):
        yield name, full.pop(name)


def iter_full(
    model: nn.Module,
    *,
    bucket_bytes: int = _BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    to: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> ParameterStream:
    """Return an iterator over names and full parameters, which arrive during training.

    For pushing weights into an inference engine. Every rank calls it, between an optimizer's steps,
    and copies its shards to the CPU; then training may go on, also before anything was consumed.
    Threads of each rank send its parts, independently of the main thread. Ranks in ``to`` iterate
    over all parameters, as they were at the call, in the model's order, at their own pace; the
    others get nothing, and need not iterate. Streams of a process group run one after another.

    Memory on the host: a copy of the shards that this rank sends, freed as they are sent. For each
        rank in ``to``, also this rank's part of a bucket. On ranks in ``to`` also three buckets, in
        addition to what the consumer keeps: one that is consumed, one ahead, and its messages. A
        bucket is
    ``bucket_bytes``, or one parameter that is larger.

    Args:
        model: with sharded modules, or a plain one. Buffers are not streamed: each rank has them.
        bucket_bytes: how much travels at once, in bytes.
        dtype: of floating-point parameters in the stream; None: that in which they are stored.
        to: the global ranks that get the parameters; None: all ranks of the model.
        group: a gloo process group of all ranks of the model, without other users; None: one
            that is made for streams, of all ranks.

    Returns:
        An iterator of ``(name, tensor)``: plain tensors on the CPU, of the parameter's whole shape,
        the consumer's own. Names are those of the unwrapped model; a tied parameter comes once, by
        its first name. Close it, or leave its ``with`` block, to end it early.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if parameters are on the meta device or have ``Partial`` placements, or ranks in
            ``to`` have no part of the model, or ``group`` has other ranks than the model.
        RankMismatchError: if ``group`` is not the same on all ranks.
        RuntimeError: inside an ``unsharded`` block of the model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass an nn.Module")
    params = ParamNames(model, None).params
    return stream_of(params, params, bucket_bytes=bucket_bytes, dtype=dtype, to=to, group=group)


def stream_of(
    params: Mapping[str, torch.Tensor],
    names: Iterable[str],
    *,
    bucket_bytes: int = _BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    to: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> ParameterStream:
    """Return the stream of some parameters of a model; the rest is as in ``iter_full``.

    Args:
        params: all parameters of the model, as an optimizer holds them.
        names: of those that travel.
        bucket_bytes: how much travels at once, in bytes.
        dtype: of floating-point parameters in the stream.
        to: the global ranks that get them.
        group: of all ranks of the model.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    ranks = ranks_of(params) or {rank}
    process_group = (
        group_for(_STREAM, "full parameters", group, params, ranks) if len(ranks) > 1 else None
    )
    handover = Handover()
    try:
        _check_arguments(bucket_bytes, dtype)
        check_params(params, "iter_full()")
        targets = checked_targets(to, ranks)
        travelling = {name: params[name] for name in names}
        plan = streamed(travelling, dtype)
        with torch.no_grad():
            shards = PinnedShards(travelling, plan, targets, rank)
    except BaseException as error:  # the threads report it to other ranks
        start_after(
            partial(agree_over, _STREAM, process_group, _CPU, (), error),
            process_group,
            handover.end,
        )
        raise
    if rank not in targets:
        handover.leave()
    run = _Run(plan, bucket_bytes, targets, shards, process_group, rank, handover)
    return ParameterStream(handover, start_after(run.run, process_group, handover.end))


@dataclass(frozen=True)
class _Run:
    """The work of the threads of a stream.

    Attributes:
        plan: all that travels.
        bucket_bytes: how much at once.
        to: the ranks that get it.
        shards: this rank's.
        process_group: of the model's ranks; None: there is one.
        rank: this one.
        handover: to this rank's consumer.
    """

    plan: Sequence[Streamed]
    bucket_bytes: int
    to: Sequence[int]
    shards: PinnedShards
    process_group: dist.ProcessGroup | None
    rank: int
    handover: Handover

    @torch.no_grad()
    def run(self) -> None:
        """Move all buckets: one thread for each rank that gets them; return when all ended."""
        said = [f"bucket_bytes={self.bucket_bytes}, to={list(self.to)}"]
        said += [f"{each.name}: {each.dtype} {tuple(each.shape)}" for each in self.plan]
        agree_over(_STREAM, self.process_group, _CPU, said, None)
        buckets = buckets_of(self.plan, self.bucket_bytes)
        errors: list[BaseException] = []
        others = [rank for rank in self.to if rank != self.rank]
        lanes = [threading.Thread(target=self._answer, args=(buckets, to, errors)) for to in others]
        for lane in lanes:
            lane.start()
        if self.rank in self.to:
            try:
                receive(buckets, self.shards, self.process_group, self.rank, self.handover)
                self.handover.end(None)  # its consumer need not wait for those of others
            except BaseException as error:
                self.handover.end(error)
                errors.append(error)
        for lane in lanes:
            lane.join()
        if errors:
            raise errors[0]

    @torch.no_grad()
    def _answer(
        self, buckets: Sequence[Sequence[Streamed]], to: int, errors: list[BaseException]
    ) -> None:
        assert self.process_group is not None, "there are other ranks"
        try:
            answer(buckets, self.shards, self.process_group, self.rank, to)
        except BaseException as error:
            errors.append(error)


# -- arguments ------------------------------------------------------------------------------------


def _check_arguments(bucket_bytes: int, dtype: torch.dtype | None) -> None:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise TypeError(f"bucket_bytes is {bucket_bytes!r}; pass a positive number of bytes")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype is {dtype!r}; pass a floating-point torch.dtype, or None")


def checked_targets(to: Sequence[int] | None, ranks: set[int]) -> list[int]:
    """Return the ranks in ``to``, sorted; all of ``ranks``, the model's, if it is None.

    Raises:
        TypeError: if it is no list of numbers.
        ValueError: if it is empty, or has ranks without a part of the model.
    """
    if to is None:
        return sorted(ranks)
    if isinstance(to, int) or not all(type(rank) is int for rank in to):
        raise TypeError(f"to is {to!r}; pass a list of global ranks")
    strangers = sorted({*to} - ranks)
    if strangers or not to:
        raise ValueError(
            f"to={list(to)}, but the model is on ranks {sorted(ranks)}; pass some of those, and "
            "send what they get to other processes yourself"
        )
    return sorted({*to})
