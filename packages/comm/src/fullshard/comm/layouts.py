"""Which tensors travel directly: the choice of a layout, from a table of measured thresholds.

Owns: the table, the one in use, and the choice. All ranks choose alike, since they have the same
table and the same shapes. Refuses: measuring (see ``fit``). Ranks that share memory gather in place
and are not asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist

from fullshard.comm import compat
from fullshard.comm.direct import DirectLayout
from fullshard.comm.layout import TensorSpec

__all__ = [
    "DirectFrom",
    "LayoutTable",
    "direct_gathers",
    "direct_reductions",
    "layout_table",
    "set_layout_table",
]

_NEVER = -1  # in a state


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectFrom:
    """From how many bytes on a full tensor travels directly, not packed; None: never.

    Attributes:
        gather: in gathers.
        reduce: in reductions.

    Raises:
        ValueError: if one is neither None nor an int of 0 or more.
    """

    gather: int | None = None
    reduce: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is no number of bytes."""
        for name, value in (("gather", self.gather), ("reduce", self.reduce)):
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(
                    f"DirectFrom got {name}={value!r}; pass a number of bytes, 0 or more, or None "
                    "for never"
                )


@dataclass(frozen=True)
class LayoutTable:
    """Thresholds for each kind of process group: its backend and the device of its tensors.

    Attributes:
        rows: by ``"backend/device type"``, such as ``"gloo/cpu"``, for ranks that do not share
            memory; what is not named is never direct.

    Raises:
        TypeError: if a key is no str or a value no ``DirectFrom``.
    """

    rows: Mapping[str, DirectFrom]

    def __post_init__(self) -> None:
        """Keep a copy that nobody changes."""
        for key, value in self.rows.items():
            if not isinstance(key, str) or not isinstance(value, DirectFrom):
                raise TypeError(
                    f"LayoutTable got {key!r}: {value!r}; pass 'backend/device type': DirectFrom()"
                )
        object.__setattr__(self, "rows", MappingProxyType(dict(self.rows)))

    def of(self, process_group: dist.ProcessGroup, device: torch.device) -> DirectFrom:
        """The thresholds for a process group and a device."""
        return self.rows.get(key_of(process_group, device), DirectFrom())

    def state_dict(self) -> dict[str, list[int]]:
        """The table as plain numbers: gather and reduce by key, -1 for never."""
        return {
            key: [_NEVER if value is None else value for value in (row.gather, row.reduce)]
            for key, row in self.rows.items()
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Sequence[int]]) -> LayoutTable:
        """The table that gave ``state``.

        Raises:
            ValueError: if a value is not two numbers of bytes, or -1.
        """
        rows = {}
        for key, numbers in state.items():
            if len(numbers) != 2:
                raise ValueError(
                    f"the state of a LayoutTable has {list(numbers)} for {key!r}; it must be two "
                    "numbers, what LayoutTable.state_dict() gave"
                )
            gather, reduce = (None if number == _NEVER else number for number in numbers)
            rows[key] = DirectFrom(gather=gather, reduce=reduce)
        return cls(rows)


def key_of(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """The key of a process group and a device in a table."""
    return f"{'+'.join(compat.backend_names(process_group, device))}/{device.type}"


_COMMITTED = LayoutTable(
    {
        # Over 1 Gbit/s single launches gain from 2 MiB on, but a training step loses a third: see
        # benchmarks/notes.md.
        "gloo/cpu": DirectFrom(),
        "nccl/cuda": DirectFrom(),  # not measured
    }
)
_table = _COMMITTED


def layout_table() -> LayoutTable:
    """The table in use: the one committed with this package, or what was set."""
    return _table


def set_layout_table(table: LayoutTable | None) -> None:
    """Uses ``table`` from now on; None: the one committed with this package.

    Call it on all ranks alike, before the first forward: what has been used keeps its layouts.

    Raises:
        TypeError: if it is no ``LayoutTable``.
    """
    global _table
    if table is not None and not isinstance(table, LayoutTable):
        raise TypeError(f"table is a {type(table).__name__}; pass a LayoutTable or None")
    _table = _COMMITTED if table is None else table


def direct_gathers(
    specs: Sequence[TensorSpec], process_group: dist.ProcessGroup, device: torch.device
) -> tuple[int, ...]:
    """Places, in ``specs``, of the tensors that a gather between hosts takes directly."""
    return _direct(specs, process_group, _table.of(process_group, device).gather)


def direct_reductions(
    specs: Sequence[TensorSpec], process_group: dist.ProcessGroup, device: torch.device
) -> tuple[int, ...]:
    """Places, in ``specs``, of the tensors that a reduction between hosts takes directly."""
    return _direct(specs, process_group, _table.of(process_group, device).reduce)


def _direct(
    specs: Sequence[TensorSpec], process_group: dist.ProcessGroup, least: int | None
) -> tuple[int, ...]:
    world_size = process_group.size()
    if least is None or world_size == 1:
        return ()
    return tuple(
        index
        for index, spec in enumerate(specs)
        if spec.numel * spec.dtype.itemsize >= least and DirectLayout.eligible(spec, world_size)
    )
