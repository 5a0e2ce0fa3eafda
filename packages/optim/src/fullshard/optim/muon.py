"""Muon on sharded parameters: each matrix is orthogonalised whole, on the one rank that owns it.

Owns the optimizer: momentum on shards, what becomes of the owner's result, groups and their
options. ``schedule`` chooses the owner of each matrix, and ``exchange`` moves the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fullshard.optim.base.loading import Shapes
from fullshard.optim.base.options import require_count, require_not_negative, require_one_of
from fullshard.optim.base.stepped import Stepped, label_of
from fullshard.optim.newton_schulz import COEFFICIENTS, flops_of, orthogonalised
from fullshard.optim.owners.matrices import Split, matrix_shape
from fullshard.optim.owners.matrix_exchange import Arrived
from fullshard.optim.owners.optimizer import MatrixOptimizer, MatrixWork
from fullshard.optim.owners.schedule import Job, Schedule

__all__ = ["Muon"]

_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(MatrixOptimizer):
    """Momentum, orthogonalised by Newton-Schulz: the same on every mesh as on the whole model.

    K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024, with the weight
    decay and the scale of Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982).
    Options have ``torch.optim.Muon``'s names and defaults, and on plain matrices the result is its,
    bit for bit. Sharded matrices travel to an owner in bf16, where the iteration begins and ends in
    bf16, and back: 4 (W-1)/W bytes per element for W ranks. A group with ``algorithm="adamw"`` is
    stepped by AdamW, with ``lr``, ``weight_decay``, ``betas`` and ``eps``; see ``matrix_groups``.
    3-D parameters are matrices side by side, ``[experts, rows, columns]``.

    Args:
        params: parameters, or groups of them. All ranks have the same.
        lr: the learning rate.
        weight_decay: parameters shrink by ``lr * weight_decay`` at each step.
        momentum: how much of the average of gradients stays at each step.
        nesterov: go by what the average will be after the next gradient like this one.
        ns_coefficients: a, b and c of the iteration.
        eps: the least norm by which a matrix is divided; in AdamW's groups, what is added to its
            denominator, 1e-8 by default.
        ns_steps: iterations.
        adjust_lr_fn: how the shape scales an update of ``rows`` and ``columns``: "original", or
            None, by ``sqrt(max(1, rows / columns))``; "match_rms_adamw" by ``0.2 sqrt(max(rows,
            columns))``, so that ``lr`` and decay of AdamW fit.
        algorithm: "muon" or "adamw".
        betas: of AdamW.
        split: a parameter holds several matrices, concatenated in ``split_dim``, such as a fused
            projection: how many equal ones, or the size of each.
        split_dim: the dim in which the matrices are concatenated: 0, its rows, or 1.

    Raises:
        ValueError: if an option is out of its range, or a parameter of a Muon group has one dim.
    """

    algorithm = "muon"

    def __init__(  # torch's arguments, then ours
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        algorithm: str = "muon",
        betas: tuple[float, float] = (0.9, 0.999),
        split: Split = None,
        split_dim: int = 0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "algorithm": algorithm,
                "betas": betas,
                "split": split,
                "split_dim": split_dim,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options that it lacks are the optimizer's.

        Raises:
            ValueError: if an option is out of its range, or a parameter does not fit it.
        """
        if param_group.get("algorithm", self.defaults["algorithm"]) == "adamw":
            param_group.setdefault("eps", 1e-8)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state over; groups that ``torch.optim.Muon`` saved gain our options."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name in ("algorithm", "betas", "split", "split_dim"):
                group.setdefault(name, self.defaults[name])

    def _require_options(self, group: Mapping[str, Any]) -> None:
        require_not_negative(group, "momentum")
        require_one_of(group, "adjust_lr_fn", _ADJUSTMENTS)
        require_count(group, "ns_steps", 99)
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients is {group['ns_coefficients']!r}; pass three numbers")

    def _shapes_of_matrix(self, group: Mapping[str, Any], param: torch.Tensor) -> Shapes:
        return {"momentum_buffer": tuple(param.shape)}

    def _require_matrix_fits(self, each: Stepped) -> None:
        if each.state:
            each.part("momentum_buffer")

    def _job_of(self, each: Stepped) -> Job:
        options, steps = each.options, each.options["ns_steps"]
        return Job(
            each.spec,
            tuple(each.param.shape),
            options["split"],
            options["split_dim"],
            f"in {steps} steps",
            partial(flops_of, steps=steps),
            label_of(each.param),
        )

    def _step_matrices(
        self, matrices: Sequence[Stepped], rest: Sequence[Sequence[Stepped]]
    ) -> None:
        for each in matrices:
            if not each.state:
                each.state["momentum_buffer"] = each.like()
        jobs = list(map(self._job_of, matrices))
        if self._schedule is None or not self._schedule.is_of(jobs):
            self._schedule = Schedule(jobs, torch.bfloat16)
        self._schedule.run(_MuonWork(matrices, rest))


class _MuonWork(MatrixWork):
    """Muon's work on matrices."""

    def give(self, at: int) -> torch.Tensor:
        """Return the update before it is orthogonalised, after moving the momentum."""
        each = self._matrices[at]
        average, momentum = each.part("momentum_buffer"), each.options["momentum"]
        gradient = each.gradient.to(average.dtype)
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum) if each.options["nesterov"] else average

    def compute(self, at: int, number: int, matrix: torch.Tensor) -> torch.Tensor:
        """Return the orthogonalised ``matrix``."""
        options = self._matrices[at].options
        return orthogonalised(
            matrix, options["ns_coefficients"], options["ns_steps"], options["eps"]
        )

    def add(self, each: Stepped, data: torch.Tensor, arrived: Sequence[Arrived]) -> None:
        """Shrink a parameter and add the update."""
        lr, options = float(each.options["lr"]), each.options
        data.mul_(1 - lr * options["weight_decay"])
        for part in arrived:
            scale = _scale_of(matrix_shape(part.matrix.box.size), options["adjust_lr_fn"])
            part.of(data).add_(part.values.to(data.device), alpha=-lr * scale)


def _scale_of(shape: tuple[int, int], adjust_lr_fn: str | None) -> float:
    """Return by what the learning rate is multiplied for a matrix of ``shape``.

    "original" is Jordan's; "match_rms_adamw" is section 2.2 of arXiv 2502.16982.
    """
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
