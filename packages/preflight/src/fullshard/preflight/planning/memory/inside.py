"""Memory inside the CPU's operations, which no tensor of a program shows.

``Inside`` calls each operation once on values, and counts the memory beyond its operands and
results. A large operation is called on smaller operands. ``gloo_bytes`` computes the memory inside
collectives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fullshard.preflight.compat import memory_changes, on_values
from fullshard.preflight.costs.call import Call, UnkeptError, keep_call
from fullshard.preflight.costs.kernels import kernel_of
from fullshard.preflight.races.collectives import Launched
from fullshard.preflight.tensors import local_tensors

__all__ = ["Inside", "Memory", "gloo_bytes"]

_LARGEST = 2**24  # bytes of the operands of a call on values
_LONGEST = 2e8  # FLOPs of such a call
_FEWEST = 4  # rows of smaller operands: with fewer, oneDNN may choose another algorithm
_SIZE = 16  # dims of equal size count as one dim from this size on
_SEGMENT = 2**20  # bytes of gloo's ring
_UNCALLED = ("aten::_foreach", "aten::_fused", "aten::_amp", "aten::record_stream")
_ROWS = {  # which arguments have the rows of a batch as their first dim
    "aten::convolution": (0,),
    "aten::convolution_backward": (0, 1),
    "aten::mkldnn_rnn_layer": (0,),
    "aten::mkldnn_rnn_layer_backward": (0, 7, 10),
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that an operation allocates.

    Attributes:
        inside: bytes beyond its operands and results, at the worst moment.
        results: bytes of the storage of each returned tensor.
    """

    inside: float = 0
    results: tuple[float, ...] = ()

    def beyond(self, fewer: Memory, ratio: float) -> Memory:
        """Extrapolate on a straight line from a smaller call and this one.

        Args:
            fewer: memory of the smaller call.
            ratio: distance beyond this call, as a multiple of the distance between both.
        """
        pairs = zip(self.results, fewer.results, strict=True)
        return Memory(
            max(0, self.inside + ratio * (self.inside - fewer.inside)),
            tuple(more + ratio * (more - less) for more, less in pairs),
        )


_NOTHING = Memory()
_known: dict[tuple[Call, int], Memory] = {}


class Inside:
    """Memory inside operations, and larger storages of their results.

    Args:
        kernels: whether ranks run the kernels of this machine's CPU. If not, only results count
            that are empty in a plan and not in a step: the workspace of an LSTM.
    """

    def __init__(self, *, kernels: bool) -> None:
        self._kernels = kernels

    def seen(self, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, Any]:
        """Return the bytes inside an operation, and its result with the memory of a real one.

        Args:
            func: the operator.
            args: its arguments, without values.
            kwargs: those by name.
            result: what it returned for them.
        """
        several = isinstance(result, tuple)
        if func.namespace != "aten" or not (self._kernels or several):
            return 0, result
        made = list(local_tensors((result,)))
        is_short = several and any(not each.numel() for each in made)
        if not (self._kernels or is_short):
            return 0, result
        kernel = kernel_of(func, args, kwargs, result)
        if kernel is None or kernel.name.startswith(_UNCALLED) or "out" in kwargs:
            return 0, result
        try:
            call = keep_call(func, args, kwargs)
        except UnkeptError:
            return 0, result
        sizes = [each.untyped_storage().nbytes() for each in made]
        found = _memory_of(call, kernel.flops, sizes)
        if is_short and len(made) == len(result) == len(found.results):
            result = tuple(map(_filled, made, found.results))
        if not self._kernels:
            return 0, result
        for tensor, nbytes in zip(local_tensors((result,)), found.results, strict=False):
            if tensor.untyped_storage().nbytes() < nbytes:
                tensor.untyped_storage().resize_(int(nbytes))
        return int(found.inside), result


def _filled(tensor: torch.Tensor, nbytes: float) -> torch.Tensor:
    """Return a tensor of so many bytes in place of an empty one; else the tensor."""
    if tensor.numel() or nbytes < tensor.itemsize:
        return tensor
    return torch.empty(int(nbytes) // tensor.itemsize, dtype=tensor.dtype)


def _memory_of(call: Call, flops: int, sizes: list[int]) -> Memory:
    """Return the memory of a call with this process's number of threads, measured once."""
    key = call, torch.get_num_threads()
    if key not in _known:
        _known[key] = next(_found(call, flops, sizes), _NOTHING)
    return _known[key]


def _found(call: Call, flops: int, sizes: list[int]) -> Iterator[Memory]:
    """Yield the result of each method that works, the best first."""
    if any(each.dtype is torch.uint8 and not each.nbytes for each in call.operands):
        return  # a workspace is missing, and the kernel would read it
    work = _work_of(call, flops)
    if _bytes_of(call) + sum(sizes) <= _LARGEST and work <= _LONGEST:
        try:
            yield _called(call)
        except Exception:  # it wants other values than zeros, or no such type
            return
        return
    for shrink, size in _lines(call):
        try:
            found = _extended(shrink, size, work)
        except Exception:  # the smaller operands do not fit the others, or as above
            continue
        if found is not None and len(found.results) == len(sizes):
            yield Memory(found.inside, tuple(map(_likely, found.results, sizes)))
    try:
        yield _scaled(call, work, sizes)
    except Exception:  # as above
        return


def _likely(found: float, planned: int) -> float:
    """Return the bytes of a result: those of the smaller calls only for an almost empty one."""
    return found if planned <= 64 else planned


def _work_of(call: Call, flops: int) -> float:
    """Return the FLOPs of a call; for an LSTM, which has no formula, of its matrix products."""
    if "rnn" not in call.name:
        return flops
    x, *others = call.operands
    weights = sum(math.prod(each.shape) for each in others if len(each.shape) == 2)
    return 6.0 * math.prod(x.shape[:-1]) * weights


def _bytes_of(call: Call) -> int:
    """Return the bytes of the operands without workspaces, which are not filled."""
    return sum(each.nbytes for each in call.operands if each.dtype is not torch.uint8)


def _called(call: Call) -> Memory:
    """Call twice and return the memory of the second call: oneDNN caches data in the first."""
    with on_values():
        args, kwargs = call.blank()
        call.function(*args, **kwargs)
        made: list[Any] = []
        changes = memory_changes(lambda: made.append(call.function(*args, **kwargs)))
        now = most = 0
        for change in changes:
            now += change
            most = max(most, now)
        results = tuple(each.untyped_storage().nbytes() for each in local_tensors(made))
    return Memory(most - max(0, now), results)


def _lines(call: Call) -> Iterator[tuple[Any, int]]:
    """Yield ways to make a call smaller in one dim: a function of the size, and the real size."""
    operands = call.operands
    if call.name in _ROWS:
        places = [each for each in _ROWS[call.name] if call.args.items[each] is not None]
        yield partial(call.with_rows, places), operands[0].shape[0]
        return
    largest = max(operands, key=lambda each: each.nbytes)
    for size in sorted(set(largest.shape), reverse=True):
        if size >= _SIZE and all(each.shape.count(size) <= 1 for each in operands):
            yield (lambda less, size=size: call.shrunk({size: less})), size


def _extended(shrink: Any, size: int, work: float) -> Memory | None:
    """Extrapolate from two smaller calls; None if even these are too large."""
    less = size
    while _bytes_of(shrink(less)) > _LARGEST or work * less / size > _LONGEST:
        less //= 2
        if less < _FEWEST:
            return None
    more = _called(shrink(less))
    return more.beyond(_called(shrink(less // 2)), (size - less) / (less - less // 2))


def _scaled(call: Call, work: float, sizes: list[int]) -> Memory:
    """Scale the memory of a call with smaller dims by the bytes of operands and results."""
    large = {size for each in call.operands for size in each.shape if size >= 4 * _SIZE}
    part = 1
    while part < 2**10:
        part *= 2
        small = call.shrunk({size: max(_SIZE, size // part) for size in large})
        if _bytes_of(small) <= _LARGEST and work / part**3 <= _LONGEST:
            found = _called(small)
            whole, given = _bytes_of(call) + sum(sizes), _bytes_of(small) + sum(found.results)
            return Memory(found.inside * whole / max(1, given), tuple(sizes))
    return _NOTHING


def gloo_bytes(launched: Launched) -> int:
    """Return the bytes that gloo allocates from a collective's launch until it is waited for.

    Seen in torch 2.13's ``ProcessGroupGloo.cpp``, and measured: a gather fills an extra buffer
    before it is copied out; a reduce-scatter is an all-reduce of a copy; a reduction by gloo's ring
    (``gloo/allreduce.cc``) has room for two segments of at most 1 MiB.
    """
    ranks = 1 if launched.group is None else launched.group.size()
    if ranks == 1:
        return 0
    read, written = (
        sum(each.nbytes for each in tensors) for tensors in (launched.read, launched.written)
    )
    if "gather" in launched.name:
        return written
    if "reduce_scatter" in launched.name:
        return read + _segments(read, ranks)
    return _segments(read, ranks) if "reduce" in launched.name else 0


def _segments(nbytes: int, ranks: int) -> int:
    """Two segments of a ring: each rank has as many, at least two."""
    count = max(-(-nbytes // _SEGMENT), 2 * ranks)
    return 2 * -(-nbytes // (-(-count // ranks) * ranks))
