"""Counts the bytes that a step copies outside collectives, and the bytes of collectives.

Owns one counter for all contestants alike, and its definition, which is printed with its figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.preflight.spi import Storages, local_tensors
from fullshard_bench.compat import DispatchMode, group_size

__all__ = ["DEFINITION", "Collectives", "StepCounter", "shared_ranges"]

DEFINITION = (
    "copied bytes: bytes written in a step by copy, cast, clone, cat, chunk-cat, split-copy and pad"
    " operations whose source or target is a parameter, a gradient or a collective's buffer, or"
    " leads to one through other such operations; of copies to and from memory that processes"
    " share, which are a transport's, what exceeds the bytes that it moves; "
    "moved bytes: what a rank must receive, (N-1)/N of what is gathered or reduced, twice that for"
    " an all-reduce"
)

_COPIES = frozenset(
    {
        "aten::copy_",
        "aten::_to_copy",
        "aten::clone",
        "aten::cat",
        "aten::stack",
        "aten::constant_pad_nd",
        "aten::_chunk_cat",
        "aten::_foreach_copy_",
        "aten::split_with_sizes_copy",
        "aten::split_copy",
        "aten::narrow_copy",
        "fsdp::all_gather_copy_in",
        "fsdp::split_with_sizes_copy",
        "fsdp::chunk_cat",
        "fsdp::copy_",
    }
)

_KINDS = (
    ("reduce_scatter", ("reduce_scatter",)),
    ("all_gather", ("allgather", "all_gather")),
    ("all_reduce", ("allreduce", "all_reduce")),
    ("all_to_all", ("alltoall", "all_to_all")),
    ("broadcast", ("broadcast",)),
    ("reduce", ("::reduce_",)),
)


@dataclass
class Collectives:
    """Collectives of a step by kind: how many, and the bytes that a rank must receive."""

    counts: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, full: int, ranks: int, count: int = 1) -> None:
        """Note a collective over `ranks` whose full side has `full` bytes."""
        share = full * (ranks - 1) // ranks
        self.counts[kind] = self.counts.get(kind, 0) + count
        self.nbytes[kind] = self.nbytes.get(kind, 0) + (
            2 * share if kind == "all_reduce" else share
        )


@dataclass
class _Copy:
    """One copy operation: written bytes, and the storages that an operation connects."""

    nbytes: int
    storages: list[int]
    addresses: list[int]


class StepCounter(DispatchMode):
    """Counter of copies and collectives, while it is entered.

    Collectives of silent groups never reach a dispatcher; `on_silent` receives them.
    """

    def __init__(self, *, silent: bool) -> None:
        super().__init__()
        self._silent = silent
        self._storages = Storages()
        self._copies: list[_Copy] = []
        self._roots: set[int] = set()
        self.collectives = Collectives()

    def mark(self, tensors: Iterable[Any]) -> None:
        """Take note of parameters and gradients: copies that lead to them count."""
        self._roots |= {self._storages.number(each) for each in local_tensors(list(tensors))}

    def on_silent(self, kind: str, full: Any, buffers: Any, ranks: int) -> None:
        """Take note of a collective of a silent group: `full` is its larger side."""
        self.mark([full, buffers])
        self.collectives.add(kind, sum(each.nbytes for each in local_tensors(full)), ranks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and take note of it."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor first: its local operations come back here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if name in _COPIES:
            self._note_copy(func, args, kwargs, result)
        elif name.startswith(("c10d::", "_c10d_functional::")):
            self._note_collective(name, [*args, *kwargs.values()], result)
        return result

    def _note_copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        inputs = list(local_tensors([*args, *kwargs.values()]))
        outputs = list(local_tensors(out))
        if func._schema.name == "fsdp::all_gather_copy_in":
            nbytes = sum(each.nbytes for each in local_tensors(args[0]))
        else:
            written = _written(func, args, kwargs)
            nbytes = sum(each.nbytes for each in (written or outputs))
        numbers = [self._storages.number(each) for each in (*inputs, *outputs)]
        addresses = [each.data_ptr() for each in (*inputs, *outputs)]
        self._copies.append(_Copy(nbytes=nbytes, storages=numbers, addresses=addresses))

    def _note_collective(self, name: str, args: Sequence[Any], result: Any) -> None:
        kind = next((kind for kind, words in _KINDS if any(word in name for word in words)), None)
        if kind is None:
            return
        buffers = list(local_tensors([list(args), result]))
        self.mark(buffers)
        if self._silent:
            return  # counted by the group
        ranks = next((size for size in map(group_size, args) if size is not None), 1)
        tensors = [sum(each.nbytes for each in local_tensors(arg)) for arg in (*args, result)]
        self.collectives.add(kind, max(tensors), ranks)

    def copied_bytes(self, allowed: int = 0) -> int:
        """Bytes written by the copies that count.

        Args:
            allowed: bytes that a transport moves through memory that processes share; so much may
                be copied to and from it, and does not count.
        """
        parents: dict[int, int] = {}

        def root(number: int) -> int:
            while parents.setdefault(number, number) != number:
                parents[number] = parents[parents[number]]
                number = parents[number]
            return number

        for copy in self._copies:
            for number in copy.storages[1:]:
                parents[root(number)] = root(copy.storages[0])
        counted = {root(number) for number in self._roots}
        shared = shared_ranges()
        through_shared = other = 0
        for copy in self._copies:
            if any(low <= at < high for at in copy.addresses for low, high, _ in shared):
                through_shared += copy.nbytes
            elif copy.storages and root(copy.storages[0]) in counted:
                other += copy.nbytes
        return other + max(0, through_shared - allowed)


def shared_ranges() -> list[tuple[int, int, str]]:
    """Memory that this process may share with others; none without a listener.

    For each range: the first address, the address after the end, and a number that identifies the
        file.
    """
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return []
    ranges = []
    for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, rights, _, device, inode = line.split(maxsplit=5)[:5]
        if rights.endswith("s"):
            low, _, high = addresses.partition("-")
            ranges.append((int(low, 16), int(high, 16), f"{device} {inode}"))
    return ranges


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that the operation writes, by its schema; none if it returns new ones."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += list(local_tensors(value))
    return written
