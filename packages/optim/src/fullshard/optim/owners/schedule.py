"""The schedule of a step: which matrices travel together, who owns them, and what overlaps.

Owns batches, owners, and the order of a step. While owners compute one batch, the next one travels
to them and the last one back. A schedule is made once for the same parameters, after ranks have
agreed on them. Refuses to know what an optimizer gives, computes and takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from fullshard.checkpoint.spi import Box
from fullshard.optim.owners.balance import owners_of
from fullshard.optim.owners.matrices import Split, matrices_of, matrix_shape
from fullshard.optim.owners.matrix_exchange import Arrived, Batch, Matrix, Travelling, Wait
from fullshard.optim.owners.ownership import held_by, replicated_axes
from fullshard.optim.owners.ranks import ALONE, Ranks, ranks_of
from fullshard.sharding.spi import ShardingSpec

__all__ = ["Job", "Schedule", "Work"]

_ELEMENTS = 1 << 25
"""About how many elements travel together: 64 MiB in bf16, over all ranks."""


@dataclass(frozen=True)
class Job:
    """A parameter whose matrices are to be computed.

    Attributes:
        spec: how it is cut; None: a plain tensor.
        shape: that of the whole.
        split: the rule by which it holds several matrices.
        split_dim: the dim in which the matrices are concatenated.
        options: in words, those on which owners and results depend.
        cost: FLOPs of a matrix, given its rows and columns, for the balance of owners.
        label: its name in errors.
    """

    spec: ShardingSpec | None
    shape: tuple[int, ...]
    split: Split
    split_dim: int
    options: str
    cost: Callable[[int, int], int] = field(compare=False)
    label: str = field(compare=False)

    def described(self) -> str:
        """Return all that ranks must agree on, in words."""
        placed = "" if self.spec is None else f" placed as {tuple(self.spec.placements)}"
        rule = "" if self.split is None else f", split into {self.split} along {self.split_dim}"
        return f"{self.label} of shape {self.shape}{placed}{rule}, {self.options}"


class Work(Protocol):
    """The work of an optimizer on its matrices; parameters by their number."""

    def give(self, at: int) -> torch.Tensor:
        """Return this rank's part of what parameter ``at`` sends to its owners."""

    def compute(self, at: int, number: int, matrix: torch.Tensor) -> torch.Tensor:
        """Return the result for a matrix (``[rows, columns]``), number ``number`` of ``at``."""

    def take(self, at: int, arrived: Sequence[Arrived]) -> None:
        """Take this rank's part of the results for parameter ``at``; it is gone afterwards."""

    def meanwhile(self) -> None:
        """Do what needs no exchange."""


class Schedule:
    """Batches of the same jobs, for step after step.

    Attributes:
        batches: matrices that travel together, in order.
    """

    def __init__(self, jobs: Sequence[Job], dtype: torch.dtype) -> None:
        """Plan them.

        Args:
            jobs: equal, and in equal order, on all ranks that hold parts of the parameters.
            dtype: in which matrices travel.

        Raises:
            ValueError: if a rule of splitting does not fit a shape.
        """
        self._jobs = list(jobs)
        self.batches: list[Batch] = []
        meshes = dict.fromkeys(job.spec.mesh if job.spec else None for job in jobs)
        for mesh in meshes:
            ranks = ALONE if mesh is None else ranks_of(mesh)
            mine = [at for at, job in enumerate(jobs) if (job.spec and job.spec.mesh) == mesh]
            loads = [0] * ranks.size
            for part in self._parts(mine):
                matrices = self._matrices(part, ranks, loads)
                self.batches.append(Batch(matrices, ranks, dtype))

    def is_of(self, jobs: Sequence[Job]) -> bool:
        """Return whether this schedule was made for ``jobs``."""
        return self._jobs == list(jobs)

    def owned_shapes(self) -> list[tuple[int, int]]:
        """Return rows and columns of each matrix that this rank owns."""
        return [
            matrix_shape(batch.matrices[at].box.size)
            for batch in self.batches
            for at in batch.owned
        ]

    def _parts(self, mine: Sequence[int]) -> Iterable[list[int]]:
        """Yield the numbers of jobs that travel together, in order."""
        part: list[int] = []
        numel = 0
        for at in mine:
            part.append(at)
            numel += Box.whole(self._jobs[at].shape).numel
            if numel >= _ELEMENTS:
                yield part
                part, numel = [], 0
        if part:
            yield part

    def _matrices(self, part: Sequence[int], ranks: Ranks, loads: list[int]) -> list[Matrix]:
        """Return the matrices of jobs with their owners; add to ``loads`` what these do."""
        boxes, numbers, costs = [], [], []
        held = {at: self._held(at, ranks) for at in part}
        for at in part:
            job = self._jobs[at]
            for number, box in enumerate(
                matrices_of(job.shape, job.split, job.split_dim, job.label)
            ):
                boxes.append(box)
                numbers.append((at, number))
                costs.append(job.cost(*matrix_shape(box.size)))
        owners = owners_of(boxes, costs, [held[at] for at, _ in numbers], loads)
        return [
            Matrix(at, number, box, owner, held[at], replicated_axes(self._jobs[at].spec))
            for (at, number), box, owner in zip(numbers, boxes, owners, strict=True)
        ]

    def _held(self, at: int, ranks: Ranks) -> tuple[Box, ...]:
        return held_by(self._jobs[at].spec, self._jobs[at].shape, ranks.coordinates)

    def run(self, work: Work) -> None:
        """Do one step; a collective call of all ranks."""
        travelling = self._send(0, work)
        work.meanwhile()
        returned: Wait | None = None
        for index, batch in enumerate(self.batches):
            assert travelling is not None, "one was sent for each batch"
            matrices = travelling.wait()
            travelling = self._send(index + 1, work)
            results = {
                at: work.compute(
                    batch.matrices[at].param, batch.matrices[at].number, matrices.pop(at)
                )
                for at in batch.owned
            }
            if returned is not None:
                returned()
            returned = batch.to_holders(results, partial(_take, work))
        if returned is not None:
            returned()

    def _send(self, index: int, work: Work) -> Travelling | None:
        if index >= len(self.batches):
            return None
        batch = self.batches[index]
        params = dict.fromkeys(each.param for each in batch.matrices)
        return batch.to_owners({at: work.give(at) for at in params})


def _take(work: Work, arrived: Sequence[Arrived]) -> None:
    by_param: dict[int, list[Arrived]] = {}
    for each in arrived:
        by_param.setdefault(each.matrix.param, []).append(each)
    for at, parts in by_param.items():
        work.take(at, parts)
