"""Lays what owners keep over the ranks that hold the parameters, for state dicts, and back.

Owns tensors of which the owner of each matrix has a part: cut as ordinary ``DTensor``s they can be
saved, and loaded onto any mesh. Owners are those of a schedule's batch. Knows boxes; refuses to
know what a tensor means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fullshard.checkpoint.spi import Box
from fullshard.optim.owners.matrix_exchange import Arrived, Batch, Matrix
from fullshard.optim.owners.ownership import held_by, replicated_axes
from fullshard.sharding.spi import ShardingSpec

__all__ = ["Laid", "Laying", "Owned"]

Owned = dict[tuple[int, int], dict[str, torch.Tensor]]
"""What an owner keeps: by the numbers of parameter and matrix, and by name."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A tensor over ranks.

    Attributes:
        param: the number of its parameter, in the schedule.
        name: its own.
        shape: that of the whole.
        spec: how it is cut; None: it is plain.
        boxes: which part of it is each matrix's, by the number of that matrix.
    """

    param: int
    name: str
    shape: tuple[int, ...]
    spec: ShardingSpec | None
    boxes: Mapping[int, Box]


class Laying:
    """The two ways of some tensors of the parameters of a batch, in fp32; both are collective."""

    def __init__(self, batch: Batch, tensors: Sequence[Laid]) -> None:
        """Plan them.

        Args:
            batch: who owns which matrix.
            tensors: equal, and in equal order, on all ranks of the batch.
        """
        owners = {(each.param, each.number): each.owner for each in batch.matrices}
        self._tensors = tensors
        self._batch = Batch(
            [
                Matrix(at, number, box, owners[each.param, number], held, replicated)
                for at, each in enumerate(tensors)
                for held in [held_by(each.spec, each.shape, batch.ranks.coordinates)]
                for replicated in [replicated_axes(each.spec)]
                for number, box in each.boxes.items()
            ],
            batch.ranks,
            torch.float32,
        )

    def to_owners(self, parts: Sequence[torch.Tensor]) -> Owned:
        """Return what this rank owns; ``parts``: what it holds of each tensor."""
        found: Owned = {}
        if parts:
            for at, part in self._batch.to_owners(dict(enumerate(parts))).wait().items():
                key, name = self._owned(at)
                found.setdefault(key, {})[name] = part
        return found

    def to_holders(self, owned: Owned, parts: Sequence[torch.Tensor]) -> None:
        """Write what owners keep to ``parts``, what this rank holds of each tensor.

        Args:
            owned: contiguous, of as many elements as the part of each matrix.
            parts: changed.
        """
        if not parts:
            return
        keys = {at: self._owned(at) for at in self._batch.owned}
        results = {at: owned[key][name] for at, (key, name) in keys.items()}

        def take(arrived: Sequence[Arrived]) -> None:
            for each in arrived:
                each.of(parts[each.matrix.param]).copy_(each.values)

        self._batch.to_holders(results, take)()

    def _owned(self, at: int) -> tuple[tuple[int, int], str]:
        matrix = self._batch.matrices[at]
        tensor = self._tensors[matrix.param]
        return (tensor.param, matrix.number), tensor.name
