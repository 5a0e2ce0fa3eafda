"""Times single operations and single collectives, on all ranks of a process group at once.

Owns what is in the caches when a call begins, and the number of calls. Refuses anything larger than
one operation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import is_

import torch
import torch.distributed as dist

from fullshard.comm import ProcessGroupTransport
from fullshard.preflight.costs.call import Call
from fullshard.preflight.tensors import local_tensors

__all__ = ["COLLECTIVES", "Caches", "Moved", "time_call", "time_collective"]

_UNTIMED, _TIMED, _MOST = 2, 9, 41
_LONG = 10e-3  # seconds that quick operations are timed for
_LARGEST = 2**26  # bytes
_SIDE = 256  # size of the matrices of a product during a collective: a third of a millisecond
_FEW = 64  # products that tell what one takes alone
_MOST_LEFT = 0.95  # of a collective, after it ran for twice its own time during computation
_OVER = ProcessGroupTransport()


@dataclass(frozen=True, slots=True)
class Moved:
    """The cost of a collective.

    Attributes:
        seconds: from its call to its end, of ranks that wait for it.
        beside: the seconds on ranks that compute during the collective; threads that move its bytes
            then wait for a core again and again.
        stolen: additional seconds of the computation during the collective, its call included.
    """

    seconds: float
    beside: float = 0.0
    stolen: float = 0.0


class Caches:
    """Other memory, touched before a call to give its operands the right cache distance."""

    def __init__(self) -> None:
        self._memory = torch.zeros(_LARGEST // 4)
        self._tiny = torch.zeros(1)

    def arrange(self, touches: Sequence[tuple[int, Callable[[], object]]]) -> None:
        """Touch what is to be so many bytes away, and other memory between: farthest first."""
        distances = sorted({distance for distance, _ in touches}, reverse=True)
        for distance, following in pairwise([*distances, 0]):
            for other, touch in touches:
                if other == distance < _LARGEST:
                    touch()
            self.touch(distance - following)
        self._tiny.add(self._tiny)  # the interpreter is not what was touched long ago

    def touch(self, nbytes: int) -> None:
        """Read and write so many bytes, half of them each."""
        half = min(nbytes, _LARGEST) // 8
        if half:
            self._memory[:half].copy_(self._memory[half : 2 * half])


def _touch_new(sizes: Sequence[int]) -> None:
    """Touch memory that is free then, and the first to be given out again."""
    held = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    del held


@torch.no_grad()
def time_call(
    call: Call, caches: Caches, middle: Callable[[list[float]], float] = statistics.median
) -> float:
    """Return the seconds of an operation, with operands at the cache distance of the call.

    Args:
        call: the operation.
        caches: of this rank.
        middle: of what several calls took.
    """
    function = call.function
    args, kwargs = call.made()
    made = list(local_tensors((args, list(kwargs.values()))))
    pairs = zip(call.operands, made, strict=True)
    touches: list[tuple[int, Callable[[], object]]] = [(o.distance, t.sum) for o, t in pairs]
    returned = [
        each
        for each in local_tensors(function(*args, **kwargs))
        if not any(map(partial(is_, each), made))
    ]
    if call.distance:
        sizes = [each.nbytes for each in returned]
        touches.append((call.distance, partial(_touch_new, sizes)))
    del returned
    seconds: list[float] = []
    for count in range(_UNTIMED + _MOST):
        caches.arrange(touches)
        start = time.perf_counter()
        function(*args, **kwargs)  # what it returns is freed in this time, as in a step
        end = time.perf_counter()
        if count >= _UNTIMED:
            seconds.append(end - start)
        if len(seconds) >= _TIMED and sum(seconds) > _LONG:
            break
    return middle(seconds)


def _gather(nbytes: int, group: dist.ProcessGroup) -> Callable[[], dist.Work | None]:
    part = -(-nbytes // 4 // group.size())
    output, given = torch.zeros(part * group.size()), torch.zeros(part)
    return lambda: _OVER.all_gather(output, given, group, True)


def _scatter(nbytes: int, group: dist.ProcessGroup) -> Callable[[], dist.Work | None]:
    part = -(-nbytes // 4 // group.size())
    given, output = torch.zeros(part * group.size()), torch.zeros(part)
    return lambda: _OVER.reduce_scatter(output, given, group, dist.ReduceOp.SUM, True)


def _reduce(nbytes: int, group: dist.ProcessGroup) -> Callable[[], dist.Work | None]:
    given = torch.zeros(-(-nbytes // 4))
    return lambda: dist.all_reduce(given, group=group, async_op=True)


def _broadcast(nbytes: int, group: dist.ProcessGroup) -> Callable[[], dist.Work | None]:
    given, first = torch.zeros(-(-nbytes // 4)), dist.get_process_group_ranks(group)[0]
    return lambda: dist.broadcast(given, first, group=group, async_op=True)


def _exchange(nbytes: int, group: dist.ProcessGroup) -> Callable[[], dist.Work | None]:
    given = torch.zeros(-(-nbytes // 4 // group.size()) * group.size())
    output = torch.zeros_like(given)
    return lambda: dist.all_to_all_single(output, given, group=group, async_op=True)


def _meet(nbytes: int, group: dist.ProcessGroup) -> Callable[[], dist.Work | None]:
    return lambda: dist.barrier(group, async_op=True)


COLLECTIVES = {
    "_allgather_base_": _gather,
    "_reduce_scatter_base_": _scatter,
    "allreduce_": _reduce,
    "alltoall_base_": _exchange,
    "barrier": _meet,
    "broadcast_": _broadcast,
}
"""What can be measured, by the name of its operator: the bytes are an all-gather's output, a
reduce-scatter's input, else the tensor."""


class _Products:
    """Products of small matrices, which a rank computes while a collective is under way."""

    def __init__(self) -> None:
        self._matrix = torch.rand(_SIDE, _SIDE)

    def compute(self, until: float) -> int:
        """Compute until a moment of the clock; return how many products."""
        count = 0
        while time.perf_counter() < until:
            torch.mm(self._matrix, self._matrix)
            count += 1
        return count

    def seconds(self, count: int) -> float:
        """Return the seconds of ``count`` products without a collective."""
        few = min(count, _FEW)
        start = time.perf_counter()
        for _ in range(few):
            torch.mm(self._matrix, self._matrix)
        return (time.perf_counter() - start) * count / max(1, few)


def time_collective(name: str, nbytes: int, group: dist.ProcessGroup, caches: Caches) -> Moved:
    """The median cost of a collective of float32, from memory that was not touched for long.

    A call counts with the time of its slowest rank. A collective call; all ranks get the same.
    """
    launch, products = COLLECTIVES[name](nbytes, group), _Products()
    found: list[tuple[float, float, float]] = []
    for _ in range(_UNTIMED + _TIMED):
        _meet_from_far(group, caches)
        start = time.perf_counter()
        work = launch()
        if work is not None:
            work.wait()
        seconds = time.perf_counter() - start
        _meet_from_far(group, caches)
        found.append((seconds, *_beside(launch, seconds, products)))
    slowest = torch.tensor(found[_UNTIMED:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return Moved(*slowest.median(dim=0).values.tolist())


def _meet_from_far(group: dist.ProcessGroup, caches: Caches) -> None:
    """Touch other memory, then wait for all ranks."""
    caches.touch(_LARGEST)
    dist.all_reduce(torch.zeros(1), group=group)


def _beside(
    launch: Callable[[], dist.Work | None], seconds: float, products: _Products
) -> tuple[float, float]:
    """Return the cost of a collective during computation, and the slowdown of the computation.

    The rank computes for twice the seconds of the collective alone, then waits for the rest: works
    of gloo do not all tell when they are over.
    """
    start = time.perf_counter()
    work = launch()
    count = products.compute(start + 2 * seconds)
    computed = time.perf_counter()
    if work is not None:
        work.wait()
    left = min(time.perf_counter() - computed, _MOST_LEFT * seconds) / seconds
    elapsed = computed - start
    lost = max(0.0, elapsed - products.seconds(count)) / elapsed
    beside = elapsed / (1 - left)
    return beside, lost * beside
