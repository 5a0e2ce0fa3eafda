"""Keeps the operations that a step calls, as they can be called again, with what caches hold then.

Operands that were not used for long have left the caches; how long is part of a call: the bytes of
other memory touched after the operand, as in the stack model of Mattson, Gecsei, Slutz and Traiger
("Evaluation techniques for storage hierarchies", 1970).
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fullshard.preflight.compat import schema_of, storage_address
from fullshard.preflight.costs.call import Call, UnkeptError, keep_call, nearby
from fullshard.preflight.costs.kernels import Kernel, kernel_of
from fullshard.preflight.tensors import local_tensors

__all__ = ["Calls"]

_NEAR = 2**17  # bytes: memory that stays in the caches of a core after any other access
_FAR = 2**26  # bytes: more than caches hold
_Range = tuple[int, int, int]  # a storage's number, begin and end in bytes
_FREE = ("prim", "profiler", "c10d")


class Calls:
    """Keeps the calls of a step, with how long ago each operand was touched.

    New memory is taken to be what was freed last of as many bytes, as allocators do.
    """

    def __init__(self) -> None:
        self._touched: dict[_Range, None] = {}  # latest last
        self._numbers: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by a storage's address
        self._freed: dict[int, list[int]] = {}  # numbers by bytes
        self._seen = 0

    def kernel_of(self, func: Any, args: Any, kwargs: Any, result: Any) -> Kernel | None:
        """The work of an operation, with its call; of views, too, which take the host's time."""
        kernel = kernel_of(func, args, kwargs, result)
        if func.namespace in _FREE:
            return kernel
        kept = self._call(func, args, kwargs, result, touches=kernel is not None)
        if kernel is None:
            return Kernel(schema_of(func).name, 0, 0, torch.float32, kept)
        for tensor in local_tensors((args, list(kwargs.values()), result)):
            key = self._range_of(tensor)
            self._touched.pop(key, None)
            self._touched[key] = None
        return replace(kernel, call=kept)

    def _call(
        self, func: Any, args: Any, kwargs: Any, result: Any, *, touches: bool
    ) -> Call | None:
        """Return the record of a call; None if it cannot be called elsewhere."""
        if func.namespace != "aten":
            return None
        distance = self._distance if touches else nearby
        try:
            kept = keep_call(func, args, kwargs, distance)
        except UnkeptError:
            return None
        return replace(kept, distance=max(map(distance, local_tensors((result,))), default=0))

    def _distance(self, tensor: torch.Tensor) -> int:
        """Bytes touched since a tensor was, rounded up to a power of four times the least."""
        storage, begin, end = self._range_of(tensor)
        total = 0
        for other, first, last in reversed(self._touched):
            if other == storage and first < end and begin < last:
                break
            total += last - first
            if total >= _FAR:
                break
        else:
            return _FAR
        if total < _NEAR:
            return 0
        rounded = _NEAR
        while rounded < total:
            rounded *= 4
        return min(rounded, _FAR)

    def _range_of(self, tensor: torch.Tensor) -> _Range:
        """Return the number of a tensor's storage, and the range of bytes that the tensor uses."""
        storage = tensor.untyped_storage()
        begin = int(tensor.storage_offset()) * tensor.itemsize
        nbytes = min(tensor.nbytes, storage.nbytes())
        return self._number(storage), begin, begin + nbytes

    def _number(self, storage: torch.UntypedStorage) -> int:
        """A number for its memory: new memory gets that of the last freed memory of its size."""
        address = storage_address(storage)
        found = self._numbers.get(address)
        if found is not None and found[1]() is not None:
            return found[0]
        nbytes = storage.nbytes()
        freed = self._freed.get(nbytes)
        if freed:
            number = freed.pop()
        else:
            self._seen += 1
            number = self._seen
        forget = partial(self._forget, address, number, nbytes)
        self._numbers[address] = number, weakref.ref(storage, forget)
        return number

    def _forget(self, address: int, number: int, nbytes: int, reference: object) -> None:
        found = self._numbers.get(address)
        if found is not None and found[0] == number:
            del self._numbers[address]
        self._freed.setdefault(nbytes, []).append(number)
