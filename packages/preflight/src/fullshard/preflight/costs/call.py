"""An operation as it can be called again elsewhere: its name, its numbers, its operands' forms.

Owns the tensors that stand in for its operands when it is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Call", "Items", "Operand"]


@dataclass(frozen=True, slots=True)
class Operand:
    """The form of a tensor that an operation takes.

    Attributes:
        shape: its sizes.
        stride: its strides, in elements.
        dtype: of its elements.
        distance: bytes touched since it was touched last, rounded up.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    distance: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def made(self, bound: int) -> torch.Tensor:
        """A tensor of this form: numbers from 0 to 1, or integers below ``bound``."""
        pairs = zip(self.shape, self.stride, strict=True)
        numel = 1 + sum((size - 1) * stride for size, stride in pairs if size)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            flat = torch.rand(numel).to(self.dtype)
        else:
            flat = torch.randint(2 if self.dtype is torch.bool else bound, (numel,))
            flat = flat.to(self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Items:
    """A list or a tuple of arguments, which can be looked up."""

    items: tuple[Any, ...]
    is_list: bool


@dataclass(frozen=True, slots=True)
class Call:
    """One operation with the forms of its arguments; two that are equal cost the same.

    Attributes:
        name: the operator's, such as ``aten::mm``.
        overload: which of its forms.
        args: its arguments; tensors as ``Operand``.
        kwargs: those by name.
        distance: of what it returns, as of an operand.
    """

    name: str
    overload: str
    args: Items
    kwargs: tuple[tuple[str, Any], ...]
    distance: int = 0

    @property
    def function(self) -> Any:
        """The operator."""
        space, _, name = self.name.partition("::")
        return getattr(getattr(getattr(torch.ops, space), name), self.overload or "default")

    @property
    def operands(self) -> list[Operand]:
        """The forms of its tensors, in order."""
        return list(_operands((self.args, *(value for _, value in self.kwargs))))

    def made(self) -> tuple[list[Any], dict[str, Any]]:
        """Arguments to call it with: tensors of the forms that are kept.

        Integers, which may be indices, are below every size, so that none is out of bounds.
        """
        floats = [each.shape for each in self.operands if each.dtype.is_floating_point]
        sizes = [size for shape in floats for size in shape if size > 1]
        sizes += [each for each in self.args.items if type(each) is int and each > 1]
        bound = min(sizes, default=2)
        return (
            [_made(each, bound) for each in self.args.items],
            {name: _made(value, bound) for name, value in self.kwargs},
        )

    def __str__(self) -> str:
        """As a key of a table: name, arguments."""
        named = _text(Items(self.kwargs, is_list=True))
        return f"{self.name}.{self.overload}{_text(self.args)}{named}@{self.distance}"


def _text(value: Any) -> str:
    if isinstance(value, Operand):
        shape, stride = ("x".join(map(str, each)) for each in (value.shape, value.stride))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}|{stride}]@{value.distance}"
    if isinstance(value, Items):
        return f"({', '.join(map(_text, value.items))})"
    return f"({', '.join(map(_text, value))})" if isinstance(value, tuple) else str(value)


def _operands(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, Items):
        value = value.items
    if isinstance(value, tuple):
        for each in value:
            yield from _operands(each)


def _made(value: Any, bound: int) -> Any:
    if isinstance(value, Operand):
        return value.made(bound)
    if isinstance(value, Items):
        made = [_made(each, bound) for each in value.items]
        return made if value.is_list else tuple(made)
    return value
