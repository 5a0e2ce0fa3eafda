"""The direct layout: large tensors travel from where they lie to where they belong.

Owns: the arithmetic of a group in which some tensors have a buffer each, that is the full tensor
itself with padding at its tail only, and the others share one rank-major buffer, which carries the
marks. It is pure mathematics, as every layout. Refuses: choosing which tensors (see ``layouts``)
and moving data (``direct_gather`` and ``direct_reduce`` do).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fullshard.comm.layout import BufferSpec, Slot, TensorSpec, pieces_of
from fullshard.comm.rank_major import RankMajorLayout

__all__ = ["DirectLayout"]

_ALIGNMENT = 16  # bytes that every rank's part must be a multiple of
_MOST_PADDING = 8  # the tail may be an eighth of the tensor


class DirectLayout:
    """Some tensors have a buffer of their own each, the others one rank-major buffer behind them.

    The buffer of a direct tensor is the full tensor, cut along dim 0 into chunks of equal size;
    where they hold more rows than the tensor, padding lies behind it.

    Args:
        specs: the full tensors; at least one.
        world_size: number of ranks, at least 1.
        direct: places, in ``specs``, of those that have a buffer of their own; each must be
            ``eligible``.
        marks: extra elements in each rank's slice of the last buffer. Only legal if all dtypes are
            equal.

    Raises:
        ValueError: if any argument is outside what is said above.
    """

    __slots__ = (
        "_alone",
        "_buffers",
        "_direct",
        "_hash",
        "_marks",
        "_others",
        "_packed",
        "_rest",
        "_slots",
    )

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        world_size: int,
        direct: Collection[int],
        *,
        marks: int = 0,
    ) -> None:
        self._packed = RankMajorLayout(specs, world_size, marks=marks)
        self._direct = tuple(sorted(set(direct)))
        self._validate()
        self._others = tuple(i for i in range(len(self.specs)) if i not in set(self._direct))
        self._marks = marks
        self._rest = self._layout_of_the_rest()
        self._alone = tuple(
            RankMajorLayout((self.specs[index],), world_size) for index in self._direct
        )
        buffers = [buffer for alone in self._alone for buffer in alone.buffers]
        slots: dict[int, Slot] = {
            index: Slot(buffer=place, offset=0, pieces=pieces_of(self.specs[index], world_size))
            for place, index in enumerate(self._direct)
        }
        if self._rest is not None:
            buffers += self._rest.buffers
            for index, slot in zip(self._others, self._rest.slots, strict=False):
                slots[index] = replace(slot, buffer=len(self._direct))
        self._buffers = tuple(buffers)
        self._slots = tuple(slots[index] for index in range(len(self.specs)))
        self._hash = hash((self._packed, self._direct))

    def _validate(self) -> None:
        for index in self._direct:
            if not 0 <= index < len(self.specs):
                raise ValueError(
                    f"DirectLayout got the place {index} in direct; there are {len(self.specs)} "
                    "tensors. Pass places in specs."
                )
            if not self.eligible(self.specs[index], self.world_size):
                spec = self.specs[index]
                raise ValueError(
                    f"DirectLayout got the tensor {index} of shape {spec.shape} and {spec.dtype}, "
                    f"cut along dim {spec.dim} among {self.world_size} ranks; a direct tensor is "
                    "cut along dim 0, each part a multiple of 16 bytes, with padding of at most an "
                    "eighth of it. Leave it out of direct."
                )

    @staticmethod
    def eligible(spec: TensorSpec, world_size: int) -> bool:
        """Whether a tensor can have a buffer of its own.

        It is cut along dim 0, every rank's part is a multiple of 16 bytes, and the padding behind
        it is at most an eighth of it.
        """
        if spec.dim or spec.numel == 0:
            return False
        chunk = spec.chunk_rows(world_size) * spec.row_numel
        padding = chunk * world_size - spec.numel
        aligned = chunk * spec.dtype.itemsize % _ALIGNMENT == 0
        return aligned and padding * _MOST_PADDING <= spec.numel

    def _layout_of_the_rest(self) -> RankMajorLayout | None:
        others = [self.specs[index] for index in self._others]
        if not others and not self._marks:
            return None
        if not others:  # marks alone, behind a tensor of nothing
            others = [TensorSpec(shape=(0,), dtype=self.specs[0].dtype)]
        return RankMajorLayout(others, self.world_size, marks=self._marks)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors, in the order in which they were given."""
        return self._packed.specs

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._packed.world_size

    @property
    def direct(self) -> tuple[int, ...]:
        """Places of the tensors that have a buffer each, in the order of the buffers."""
        return self._direct

    @property
    def others(self) -> tuple[int, ...]:
        """Places of the tensors that share the last buffer."""
        return self._others

    @property
    def rest(self) -> RankMajorLayout | None:
        """The layout of the last buffer, of the others and the marks; None if there are none.

        Where all tensors are direct and there are marks, it is of one tensor without elements.
        """
        return self._rest

    @property
    def alone(self) -> tuple[RankMajorLayout, ...]:
        """Of each direct tensor the layout of its buffer, in their order."""
        return self._alone

    @property
    def packed(self) -> RankMajorLayout:
        """The same tensors and marks in one rank-major buffer."""
        return self._packed

    @property
    def buffers(self) -> tuple[BufferSpec, ...]:
        """One buffer for each direct tensor, then that of the others."""
        return self._buffers

    @property
    def slots(self) -> tuple[Slot, ...]:
        """One slot per tensor, in the order of ``specs``."""
        return self._slots

    @property
    def marks(self) -> int:
        """Number of marks in each rank's slice of the last buffer."""
        return self._marks

    @property
    def marks_offset(self) -> int:
        """Bytes from the start of a slice of the last buffer to its marks."""
        if self._rest is None:
            return self._buffers[-1].slice_nbytes
        return self._rest.marks_offset

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` is direct for the same of the same tensors, world and marks."""
        if self is other:
            return True
        if not isinstance(other, DirectLayout):
            return NotImplemented
        return (self._direct, self._packed) == (other._direct, other._packed)

    def __hash__(self) -> int:
        """The hash computed at construction."""
        return self._hash

    def __repr__(self) -> str:
        """A short text: numbers of tensors, world size and marks."""
        return (
            f"DirectLayout({len(self._direct)} of {len(self.specs)} tensors, "
            f"world_size={self.world_size}, marks={self._marks})"
        )
