"""An operation as it can be called again elsewhere: its name, its numbers, its operands' forms.

Owns the tensors that stand in for its operands when it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fullshard.preflight.compat import schema_of

__all__ = ["Call", "Items", "Operand", "UnkeptError", "keep_call", "nearby"]

_CONSTANTS = (
    int, float, bool, complex, str, type(None),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


class UnkeptError(Exception):
    """An argument cannot be made again."""


def nearby(tensor: torch.Tensor) -> int:
    """Return 0, the distance of the operand that was touched last."""
    return 0


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

    @property
    def _reach(self) -> int:
        """Elements from the first to the last, with those that its strides leave out."""
        pairs = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in pairs if size)

    def made(self, bound: int) -> torch.Tensor:
        """A tensor of this form: numbers from 0 to 1, or integers below ``bound``."""
        if self.dtype.is_floating_point or self.dtype.is_complex:
            flat = torch.rand(self._reach)
        else:
            flat = torch.randint(2 if self.dtype is torch.bool else bound, (self._reach,))
        return flat.to(self.dtype).as_strided(self.shape, self.stride)

    def blank(self) -> torch.Tensor:
        """Return a tensor of this form: zeros, which are valid indices, or uninitialised bytes."""
        make = torch.empty if self.dtype is torch.uint8 else torch.zeros
        return make(self._reach, dtype=self.dtype).as_strided(self.shape, self.stride)

    def resized(self, dim: int, size: int) -> Operand:
        """Return this form with another size of one dim, as dense as before."""
        shape, before, step = list(self.shape), self.shape[dim], self.stride[dim]
        shape[dim] = size
        stride = tuple(
            each // before * size if each > step and each % before == 0 else each
            for each in self.stride
        )
        return replace(self, shape=tuple(shape), stride=stride)

    def shrunk(self, sizes: Mapping[int, int]) -> Operand:
        """Return this form with the dims of some sizes replaced.

        Args:
            sizes: the new sizes, by the present sizes.
        """
        made = self
        for dim, size in enumerate(self.shape):
            if size in sizes:
                made = made.resized(dim, sizes[size])
        return made


@dataclass(frozen=True, slots=True)
class Items:
    """A list or a tuple of arguments, which can be looked up."""

    items: tuple[Any, ...]
    is_list: bool


@dataclass(frozen=True, slots=True)
class Call:
    """An operation with the forms of its arguments; equal calls have equal costs.

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
        return self._with(lambda operand: operand.made(bound))

    def blank(self) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments for a call that measures memory: tensors of zeros."""
        return self._with(Operand.blank)

    def _with(self, make: Callable[[Operand], torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        kwargs = {name: _changed(value, make) for name, value in self.kwargs}
        return _changed(self.args, make), kwargs

    def shrunk(self, sizes: Mapping[int, int]) -> Call:
        """Return this call on smaller operands.

        Args:
            sizes: the new sizes of dims, by the present sizes. An equal integer among the
                arguments is replaced, too.
        """

        def shrink(value: Any) -> Any:
            if isinstance(value, Operand):
                return value.shrunk(sizes)
            if isinstance(value, Items):
                return Items(tuple(map(shrink, value.items)), value.is_list)
            return sizes.get(value, value) if type(value) is int else value

        kwargs = tuple((name, shrink(value)) for name, value in self.kwargs)
        return replace(self, args=shrink(self.args), kwargs=kwargs)

    def with_rows(self, places: Collection[int], rows: int) -> Call:
        """Return this call with so many rows in the arguments at these places."""
        args = tuple(
            each.resized(0, rows) if place in places else each
            for place, each in enumerate(self.args.items)
        )
        return replace(self, args=replace(self.args, items=args))

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


def _changed(value: Any, make: Callable[[Operand], torch.Tensor]) -> Any:
    if isinstance(value, Operand):
        return make(value)
    if isinstance(value, Items):
        made = [_changed(each, make) for each in value.items]
        return made if value.is_list else tuple(made)
    return value


def keep_call(
    func: Any, args: Any, kwargs: Any, distance: Callable[[torch.Tensor], int] = nearby
) -> Call:
    """Return an operation with the forms of its arguments.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: those by name.
        distance: of an operand.

    Raises:
        UnkeptError: if an argument is neither a constant nor a strided tensor.
    """

    def keep(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided:
                raise UnkeptError
            return Operand(tuple(value.shape), value.stride(), value.dtype, distance(value))
        if isinstance(value, (list, tuple)):
            return Items(tuple(map(keep, value)), isinstance(value, list))
        if isinstance(value, _CONSTANTS):
            return value
        raise UnkeptError

    schema = schema_of(func)
    kept = Items(tuple(map(keep, args)), is_list=True)
    named = tuple((name, keep(value)) for name, value in kwargs.items())
    return Call(schema.name, schema.overload_name, kept, named)
