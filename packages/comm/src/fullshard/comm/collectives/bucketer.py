"""Small reductions gathered into few large ones.

Owns: a bucket per process group, dtype, device and operation, into which inputs are copied until it
is full, their memory, and the callbacks that are handed the results. Refuses: scaling, casting, and
knowing what is reduced; any ``ReduceScatter`` plugs in.

Which inputs share a launch follows from the order and the sizes of the calls alone, so ranks that
make the same calls launch the same collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fullshard.comm.buffers.allocator import allocate_from
from fullshard.comm.collectives.composed import default_reduce_scatter
from fullshard.comm.debug.debug import check_collective
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime.blocks import BlockPool, Loan
from fullshard.comm.runtime.grad_mode import without_grad
from fullshard.comm.runtime.observer import EventKind, emit
from fullshard.comm.runtime.streams import canonical_device
from fullshard.comm.transports.collective import ReduceScatterLike, require_reduce_scatter

__all__ = ["ReduceScatterBucketer"]

_ALIGNMENT = 16  # bytes, so that a result may be viewed as any dtype and copied fast
_NAME = "bucketed reductions"

Callback = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class _Key:
    """What reductions have in common that may share a launch."""

    process_group: dist.ProcessGroup
    dtype: torch.dtype
    device: torch.device
    op: ReduceOp


@dataclass(frozen=True)
class _Item:
    """One reduction in a launch: where its result lies in the output, and who wants it."""

    start: int
    shape: torch.Size
    callback: Callback | None


@dataclass
class _Launch:
    """A collective that was called, and what it still needs."""

    items: Sequence[_Item]
    input: Loan
    output: torch.Tensor
    work: dist.Work | None


@dataclass
class _Bucket:
    """Inputs that wait.

    Attributes:
        memory: what ``data`` lies in.
        data: ``[world, capacity]``, a row per rank that a part is for; elements.
        used: how much of each row is taken.
        items: what lies there.
    """

    memory: Loan
    data: torch.Tensor
    used: int = 0
    items: list[_Item] = field(default_factory=list)

    @property
    def room(self) -> int:
        """How many elements of each row are free."""
        return self.data.shape[1] - self.used


class ReduceScatterBucketer:
    """Reduces and scatters many small tensors in few launches.

    All ranks make the same calls in the same order. Results come to the callbacks in the order of
    the calls within a bucket; a large input overtakes small ones that wait.

    Args:
        bucket_cap_mb: MiB of input, over all ranks' parts, that share a launch; 0 or less: every
            call is launched at once.
        comm: the collective; None: the default one of each process group.
        in_flight: how many launches may be on their way when a call returns. 0: the results of a
            launch are handed out before the call that made it returns. More overlaps them with what
            the caller does next; ``flush()`` hands out all.

    Raises:
        TypeError: if ``comm`` is no reduce-scatter, or another argument no number.
        ValueError: if ``in_flight`` is negative.
    """

    def __init__(
        self,
        bucket_cap_mb: float = 25.0,
        *,
        comm: ReduceScatterLike | None = None,
        in_flight: int = 0,
    ) -> None:
        if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
            raise TypeError(f"bucket_cap_mb is {bucket_cap_mb!r}; pass a number of MiB")
        if isinstance(in_flight, bool) or not isinstance(in_flight, int):
            raise TypeError(f"in_flight is {in_flight!r}; pass a number of launches, 0 or more")
        if in_flight < 0:
            raise ValueError(f"in_flight is {in_flight}; pass a number of launches, 0 or more")
        self.bucket_cap_mb = bucket_cap_mb
        self._capacity = max(0, int(bucket_cap_mb * 2**20))  # bytes
        self._comm = None if comm is None else require_reduce_scatter(comm)
        self._in_flight = in_flight
        self._buckets: dict[_Key, _Bucket] = {}
        self._launched: deque[_Launch] = deque()
        self._defaults: dict[dist.ProcessGroup, ReduceScatterLike] = {}
        self._pool = BlockPool()

    @without_grad
    def reduce_scatter_async(
        self,
        inputs: Sequence[torch.Tensor] | torch.Tensor,
        process_group: dist.ProcessGroup,
        callback: Callback | None = None,
        *,
        op: ReduceOp = dist.ReduceOp.SUM,
    ) -> None:
        """Reduces ``inputs`` over the ranks, now or with those that follow.

        Args:
            inputs: a part for each rank, of one shape, dtype and device: a list, or a tensor
                ``[world, ...]``. They may be freed when this returns.
            process_group: the ranks.
            callback: is handed this rank's part of the result, of the shape of one input: a view of
                new memory, which it may keep.
            op: how to reduce.

        Raises:
            ValueError: if there is not one part for each rank, or they differ in shape, dtype or
                device.
        """
        _check(inputs, process_group)
        first = inputs[0]
        key = _Key(process_group, first.dtype, canonical_device(first.device), op)
        if len(inputs) * _bytes_of(first.numel(), first.dtype) > self._capacity:
            self._launch_alone(key, inputs, callback)
        else:
            self._put(key, inputs, callback)

    @without_grad
    def flush(self) -> None:
        """Launches what waits, and returns once every result was handed out."""
        for key in list(self._buckets):
            self._launch_bucket(key)
        self._finish(0)

    def abandon(self) -> None:
        """Forgets what waits, once nothing is on its way; no callback is called, nothing launched.

        For callers that give up a round of calls, on every rank.
        """
        for bucket in self._buckets.values():
            bucket.items, bucket.used = [], 0
        while self._launched:
            self._end_oldest()

    def teardown(self) -> None:
        """Frees the buckets' memory; the next call makes new ones.

        Raises:
            RuntimeError: if results were not handed out yet.
        """
        waiting = sum(len(bucket.items) for bucket in self._buckets.values())
        waiting += sum(len(launch.items) for launch in self._launched)
        if waiting:
            raise RuntimeError(
                f"teardown() was called with {waiting} reductions whose results were not handed "
                "out; call flush() first, on every rank"
            )
        self._buckets.clear()
        self._pool.clear()
        self._defaults.clear()

    # -- launches ---------------------------------------------------------------------------------

    def _put(
        self, key: _Key, inputs: Sequence[torch.Tensor] | torch.Tensor, callback: Callback | None
    ) -> None:
        """Copies ``inputs`` into the bucket, which is launched before if they do not fit."""
        first = inputs[0]
        needed = _bytes_of(first.numel(), key.dtype) // key.dtype.itemsize
        bucket = self._buckets.get(key)
        if bucket is not None and needed > bucket.room:
            self._launch_bucket(key)
            bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = self._new_bucket(key)
        target = bucket.data[:, bucket.used : bucket.used + first.numel()]
        for row, part in zip(target, inputs, strict=True):
            row.copy_(part.reshape(-1))
        bucket.data[:, bucket.used + first.numel() : bucket.used + needed].zero_()
        bucket.items.append(_Item(bucket.used, first.shape, callback))
        bucket.used += needed
        if bucket.room == 0:
            self._launch_bucket(key)

    def _new_bucket(self, key: _Key) -> _Bucket:
        world = key.process_group.size()
        row = self._capacity // world // _ALIGNMENT * _ALIGNMENT // key.dtype.itemsize
        memory = self._memory(key, world * row)
        return _Bucket(memory, memory.data.view(world, row))

    def _memory(self, key: _Key, numel: int) -> Loan:
        """Memory for an input of ``numel`` elements: used before, where that is known to be right.

        A collective that says nothing about reuse may mean each input to be new; and elsewhere than
        on the CPU a collective may still read what was given back.
        """
        comm = self._comm_of(key.process_group)
        if key.device.type != "cpu" or not getattr(comm, "reusable", False):
            return Loan(allocate_from(comm, numel, key.dtype, key.device))
        return self._pool.lend(
            numel, key.dtype, lambda nbytes: allocate_from(comm, nbytes, torch.uint8, key.device)
        )

    def _launch_bucket(self, key: _Key) -> None:
        bucket = self._buckets[key]
        if not bucket.items:
            return
        if bucket.room == 0 and self._in_flight:
            packed = bucket.memory
            del self._buckets[key]  # the collective reads it while the next one fills
        elif bucket.room == 0:
            packed = Loan(bucket.memory.data)  # it stays the bucket's
        else:
            packed = self._memory(key, bucket.data.shape[0] * bucket.used)
            packed.data.view(-1, bucket.used).copy_(bucket.data[:, : bucket.used])
        items, bucket.items, bucket.used = bucket.items, [], 0
        self._launch(key, packed, items)

    def _launch_alone(
        self, key: _Key, inputs: Sequence[torch.Tensor] | torch.Tensor, callback: Callback | None
    ) -> None:
        first = inputs[0]
        size = len(inputs) * first.numel()
        packed = self._memory(key, size)
        for row, part in zip(packed.data.view(len(inputs), -1), inputs, strict=True):
            row.copy_(part.reshape(-1))
        self._launch(key, packed, [_Item(0, first.shape, callback)])

    def _launch(self, key: _Key, memory: Loan, items: Sequence[_Item]) -> None:
        process_group, packed = key.process_group, memory.data
        comm = self._comm_of(process_group)
        world = process_group.size()
        output = allocate_from(comm, packed.numel() // world, key.dtype, key.device)
        work = None
        if packed.numel() > 0:  # the same on all ranks, so nobody waits for it
            check_collective(EventKind.REDUCE_SCATTER, _NAME, process_group, nbytes=packed.nbytes)
            emit(
                EventKind.REDUCE_SCATTER,
                _NAME,
                rank=process_group.rank(),
                nbytes=packed.nbytes,
                stream="current",
            )
            work = comm(
                output_tensor=output,
                input_tensor=packed,
                group=process_group,
                op=key.op,
                async_op=self._in_flight > 0,
            )
        self._launched.append(_Launch(items, memory, output, work))
        self._finish(self._in_flight)

    def _finish(self, in_flight: int) -> None:
        """Hands out the results of the oldest launches, until so many are on their way."""
        while len(self._launched) > in_flight:
            launch = self._end_oldest()
            for item in launch.items:
                if item.callback is not None:
                    end = item.start + item.shape.numel()
                    item.callback(launch.output[item.start : end].view(item.shape))

    def _end_oldest(self) -> _Launch:
        """Waits for the oldest launch, and takes its input back."""
        launch = self._launched.popleft()
        if launch.work is not None:
            launch.work.wait()
        launch.input.end()
        return launch

    def _comm_of(self, process_group: dist.ProcessGroup) -> ReduceScatterLike:
        if self._comm is not None:
            return self._comm
        if process_group not in self._defaults:
            self._defaults[process_group] = default_reduce_scatter(process_group)
        return self._defaults[process_group]


def _bytes_of(numel: int, dtype: torch.dtype) -> int:
    """The bytes that one part takes in a bucket."""
    return -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _check(inputs: Sequence[torch.Tensor] | torch.Tensor, process_group: dist.ProcessGroup) -> None:
    world = process_group.size()
    if len(inputs) != world:
        raise ValueError(
            f"reduce_scatter_async got {len(inputs)} inputs for {world} ranks; pass a part for "
            "each, in rank order."
        )
    first = inputs[0]
    for index, part in enumerate(inputs):
        if (part.shape, part.dtype, part.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"input {index} is {part.dtype} of shape {tuple(part.shape)} on {part.device}, "
                f"input 0 {first.dtype} of shape {tuple(first.shape)} on {first.device}; all parts "
                "must be alike. Pad them to one shape."
            )
