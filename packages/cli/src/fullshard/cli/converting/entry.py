"""A checkpoint as named tensors that are read when they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

__all__ = ["Checkpoint", "ConvertError", "Entry", "chosen_group", "one_of_each"]


_NO_TENSORS = "{path} has no tensors; pass the folder or file of a checkpoint"


class ConvertError(ValueError):
    """A checkpoint that cannot be read or written; the message has the remedy."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        name: its name in the state dict of the model.
        shape: of the whole tensor.
        dtype: as stored.
        read: returns the whole tensor, on the CPU.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: torch.dtype | None) -> Entry:
        """Return the entry in ``dtype``, if it is a floating-point tensor."""
        if dtype is None or not self.dtype.is_floating_point:
            return self
        read = self.read
        return replace(self, dtype=dtype, read=lambda: read().to(dtype))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: the folder or file.
        format: "dcp", "safetensors", "torch" or "deepspeed".
        entries: the tensors of the model, in order.
        left_out: names of values that are not among the entries, such as optimizer state.
    """

    path: Path
    format: str
    entries: tuple[Entry, ...]
    left_out: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(each.nbytes for each in self.entries)


def chosen_group(
    groups: Iterable[tuple[str, ...]], key: str | None, usual: Sequence[str], path: Path
) -> tuple[str, ...]:
    """Return the part of a nested state dict that has the model.

    Args:
        groups: the paths of keys that lead to tensors, such as ``("model",)``.
        key: the user's choice, with dots between keys; None: the first of ``usual``.
        usual: keys that a model usually has, in order of preference.
        path: of the checkpoint, for errors.

    Raises:
        ConvertError: if there is no such part, or several and none is usual.
    """
    found = dict.fromkeys(groups)
    if not found:
        raise ConvertError(_NO_TENSORS.format(path=path))
    if key is not None:
        wanted = tuple(filter(None, key.split(".")))
        if wanted in found:
            return wanted
    else:
        for each in [*((name,) for name in usual), ()]:
            if each in found:
                return each
        if len(found) == 1:
            return next(iter(found))
    names = ", ".join(".".join(each) or "'' (the top level)" for each in found)
    asked = "" if key is None else f"no tensors under {key!r}, and "
    raise ConvertError(f"{path} has {asked}tensors under {names}; choose with --key")


def one_of_each(entries: Iterable[Entry], path: Path) -> tuple[Entry, ...]:
    """Return the entries.

    Raises:
        ConvertError: if two have one name, or there are none.
    """
    found: dict[str, Entry] = {}
    for each in entries:
        if each.name in found:
            raise ConvertError(f"{path} has {each.name} twice; choose a part with --key")
        found[each.name] = each
    if not found:
        raise ConvertError(_NO_TENSORS.format(path=path))
    return tuple(found.values())
