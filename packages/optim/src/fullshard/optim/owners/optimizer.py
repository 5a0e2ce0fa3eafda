"""The base of optimizers of whole matrices: matrices are stepped by owners, the rest by AdamW.

Owns both kinds of group, the schedule of matrices (kept between steps), and the addition of a
result to a parameter of few bits. Subclasses decide the rule for a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from fullshard.optim.adamw import adamw_shapes, require_adamw, step_adamw
from fullshard.optim.base.loading import Shapes
from fullshard.optim.base.optimizer import ShardedOptimizer
from fullshard.optim.base.options import require_betas, require_not_negative, require_one_of
from fullshard.optim.base.stepped import Stepped
from fullshard.optim.owners.matrices import require_matrices
from fullshard.optim.owners.matrix_exchange import Arrived
from fullshard.optim.owners.schedule import Job, Schedule
from fullshard.sharding.spi import untraced

__all__ = ["MatrixOptimizer", "MatrixWork"]


class MatrixOptimizer(ShardedOptimizer):
    """An optimizer whose groups hold matrices, or with ``algorithm="adamw"`` what is stepped so.

    Attributes:
        algorithm: what groups of matrices are called.
    """

    algorithm: ClassVar[str]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        """Take parameters, and options as each class documents them."""
        self._schedule: Schedule | None = None
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state over."""
        super().__setstate__(state)
        self._schedule = None

    @property
    def owned_shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of each matrix that this rank owned in its last step."""
        return [] if self._schedule is None else self._schedule.owned_shapes()

    # -- the methods of each subclass -------------------------------------------------------------

    def _require_options(self, group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` unless the options of a group of matrices are allowed."""
        raise NotImplementedError

    def _shapes_of_matrix(self, group: Mapping[str, Any], param: torch.Tensor) -> Shapes:
        """Return the keys of the state of matrices, and the whole shapes; None: a number."""
        raise NotImplementedError

    def _require_matrix_fits(self, each: Stepped) -> None:
        """Raise ``RuntimeError`` unless matrices have no state yet, or one that fits."""
        raise NotImplementedError

    def _job_of(self, each: Stepped) -> Job:
        """Return what is to be done with the matrices of a parameter."""
        raise NotImplementedError

    def _step_matrices(
        self, matrices: Sequence[Stepped], rest: Sequence[Sequence[Stepped]]
    ) -> None:
        """Step all; ``rest``: by group, those of AdamW."""
        raise NotImplementedError

    # -- what they share --------------------------------------------------------------------------

    def _require_group(self, group: Mapping[str, Any]) -> None:
        require_one_of(group, "algorithm", (self.algorithm, "adamw"))
        require_not_negative(group, "lr", "weight_decay", "eps")
        require_betas(group)
        if group["algorithm"] != "adamw":
            self._require_options(group)
            require_one_of(group, "split_dim", (0, 1))
            require_matrices(group, type(self).__name__)

    def _shapes_of(self, group: Mapping[str, Any], param: torch.Tensor) -> Shapes:
        if group["algorithm"] == "adamw":
            return adamw_shapes(param)
        return self._shapes_of_matrix(group, param)

    def _require_fits(self, each: Stepped) -> None:
        if each.options["algorithm"] == "adamw":
            require_adamw(each)
        else:
            self._require_matrix_fits(each)

    def _described(self, each: Stepped) -> str:
        if each.options["algorithm"] == "adamw":
            return super()._described(each)
        return self._described_matrix(each)

    def _described_matrix(self, each: Stepped) -> str:
        """Return, in words, what ranks must agree on for a parameter of matrices."""
        return self._job_of(each).described()

    @untraced  # in its middle ranks exchange
    def _change(self, found: Sequence[Sequence[Stepped]]) -> None:
        matrices: list[Stepped] = []
        rest: list[Sequence[Stepped]] = []
        for group, stepped in zip(self.param_groups, found, strict=True):
            if group["algorithm"] != "adamw":
                matrices.extend(stepped)
            elif stepped:
                rest.append(stepped)
        self._step_matrices(matrices, rest)


class MatrixWork:
    """The part of an optimizer that steps other parameters and applies the results of owners."""

    def __init__(self, matrices: Sequence[Stepped], rest: Sequence[Sequence[Stepped]]) -> None:
        """Take the parameters of a schedule, in order, and by group those of AdamW."""
        self._matrices = matrices
        self._rest = rest

    def add(self, each: Stepped, data: torch.Tensor, arrived: Sequence[Arrived]) -> None:
        """Add the results for a parameter to ``data``, this rank's part of it, fp32 or wider."""
        raise NotImplementedError

    def take(self, at: int, arrived: Sequence[Arrived]) -> None:
        """Add the results for parameter ``at``: in fp32 at least, and rounded once."""
        each = self._matrices[at]
        data = each.wide()
        self.add(each, data, arrived)
        each.write(data)

    def meanwhile(self) -> None:
        """Step the rest by AdamW."""
        for stepped in self._rest:
            step_adamw(stepped)
