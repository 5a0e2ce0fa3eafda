"""The two averages of parameters that share a step, in fp32 during the step.

Owns which parameters go together, and their way from codes to numbers and back. A parameter alone
would be the same, bit for bit; but of a small one, the host's calls take longer than the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fullshard.optim.base.stepped import Stepped
from fullshard.optim.quantised.blocks import Blocks, shortest_rows
from fullshard.optim.quantised.dynamic_map import decoded, encoded
from fullshard.optim.quantised.kept import (
    MOMENTS,
    columns_of,
    is_cut,
    is_quantised,
    part_here,
    scale_name,
    scales_here,
)

__all__ = ["Averages", "batches_of"]

_MOST = 1 << 16
"""Elements of parameters that are stepped together: 512 KiB of averages. Caches keep them, and the
C library does not give them back at each step. A larger parameter is alone."""


def batches_of(stepped: Iterable[Stepped]) -> list[list[Stepped]]:
    """Return the parameters of a group in batches for common steps.

    The parameters of a batch have one dtype, one device and one kind of blocks. Batches follow from
    shards,
    so ranks have their own: nothing is to be exchanged by their order.
    """
    batches: list[list[Stepped]] = []
    filling: dict[tuple[object, ...], tuple[list[Stepped], int]] = {}
    for each in stepped:
        data = each.data
        rows = shortest_rows(*columns_of(each)) if is_quantised(each.param.shape) else None
        kind = (data.dtype, data.device, rows, rows is not None and is_cut(each))
        batch, count = filling.get(kind, ([], 0))
        count += data.numel()
        if not batch or count > _MOST:
            batch, count = [], data.numel()
            batches.append(batch)
        batch.append(each)
        filling[kind] = batch, count
    return batches


class Averages:
    """The two averages of the parameters in a batch.

    Attributes:
        values: by name, of each parameter, shaped as its shard: the state itself if it is fp32.
        are_cut: a block may span two ranks, which must agree on its scale before codes are written.
    """

    def __init__(self, batch: Sequence[Stepped]) -> None:
        """Read the state of a batch."""
        self.are_cut = is_cut(batch[0])
        self._batch = batch
        self._codes = [part_here(each, name) for name in MOMENTS for each in batch]
        self._blocks: Blocks | None = None
        values = self._codes
        if is_quantised(batch[0].param.shape):
            columns = [columns_of(each) for each in batch]
            self._blocks = Blocks(*shortest_rows(*columns[0]))
            self._scales = [
                scales_here(each, name, at)
                for name in MOMENTS
                for each, at in zip(batch, columns, strict=True)
            ]
            self._numbers = decoded(_joined(self._codes, self._blocks.columns))
            self._blocks.multiply(self._numbers, _joined(self._scales, self._blocks.count))
            values = _split(self._numbers, self._codes)
        halves = values[: len(batch)], values[len(batch) :]
        self.values = dict(zip(MOMENTS, halves, strict=True))

    def write_scales(self) -> None:
        """Write the largest magnitude in this rank's part of each block to the state.

        Where rows are cut, other ranks' scales are 0 then.
        """
        if self._blocks is None:
            return
        for each in self._batch if self.are_cut else ():
            for name in MOMENTS:
                each.state[scale_name(name)].zero_()
        _write(self._blocks.scales_of(self._numbers), self._scales)

    def write_codes(self) -> None:
        """Write the codes, by the scales that the state has. The averages are no more then."""
        if self._blocks is None:
            return
        self._blocks.divide(self._numbers, _joined(self._scales, self._blocks.count))
        _write(encoded(self._numbers), self._codes)


def _joined(parts: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
    """Return the parts of both averages one after another, ``[2, rows, columns]``."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    return flat.view(2, flat.numel() // (2 * max(columns, 1)), columns)


def _split(joined: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of what ``_joined`` gave, shaped as ``like``: views."""
    parts = joined.view(-1).split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def _write(joined: torch.Tensor, kept: Sequence[torch.Tensor]) -> None:
    for part, found in zip(kept, _split(joined, kept), strict=True):
        part.copy_(found)
