"""SOAP's rule for one matrix: Adam in the eigenbasis of Shampoo's two preconditioners.

Owns what is kept for a matrix, how it is laid out in tensors of the whole parameter, and one step.
N. Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv 2409.11321), algorithm
3, with the bias correction, and the order of eigenvectors that squares follow, of the authors'
program (github.com/nikhilvyas/SOAP, ``soap.py`` at commit f42d296). The authors' program keeps the
average of gradients in the eigenbasis, and rotates it into each new basis; here, as in the paper,
it is not turned.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.checkpoint.spi import Box
from fullshard.optim.eigenbasis import falling_order, first_basis, next_basis
from fullshard.optim.owners.matrices import Split, matrices_of

__all__ = ["AVERAGES", "Kept", "flops_of", "kept_of", "new_state", "start", "update_of"]

AVERAGES = ("exp_avg", "exp_avg_sq")
"""Adam's: of gradients, and of their squares in the eigenbasis."""

_SIDES = ("row", "column")
"""``row_factor`` is the paper's L and ``row_basis`` its Q_L, ``[rows, rows]``; others R and Q_R."""

State = dict[str, torch.Tensor]
"""What is kept for a matrix: averages, and factor and basis of each side that is not too long."""


# -- what is kept ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kept:
    """One tensor of a parameter's state.

    Attributes:
        shape: that of the whole. Factors and bases of all matrices are concatenated, row by row, in
            one dim: so they are cut evenly, and are never taken for a part of the parameter.
        boxes: which part of it is each matrix's, by the number of that matrix.
    """

    shape: tuple[int, ...]
    boxes: Mapping[int, Box]


@functools.cache
def kept_of(shape: tuple[int, ...], split: Split, split_dim: int, most: int) -> dict[str, Kept]:
    """Return the tensors of the state of a parameter.

    Args:
        shape: the parameter's.
        split: the rule for fused projections.
        split_dim: the dim in which the matrices are concatenated.
        most: a longer side has no preconditioner.
    """
    boxes = dict(enumerate(matrices_of(shape, split, split_dim, f"a parameter of shape {shape}")))
    found = {name: Kept(shape, boxes) for name in AVERAGES}
    for dim, side in enumerate(_SIDES, -2):
        numels = {
            number: box.size[dim] ** 2 for number, box in boxes.items() if box.size[dim] <= most
        }
        ends = list(itertools.accumulate(numels.values()))
        if ends:
            parts = {
                number: Box((end - numel,), (numel,))
                for (number, numel), end in zip(numels.items(), ends, strict=True)
            }
            found[f"{side}_factor"] = found[f"{side}_basis"] = Kept((ends[-1],), parts)
    return found


def new_state(rows: int, columns: int, most: int, device: torch.device) -> State:
    """Return the state of a matrix that was never stepped: zeros, in fp32."""
    zeros = functools.partial(torch.zeros, dtype=torch.float32, device=device)
    state = {name: zeros(rows, columns) for name in AVERAGES}
    for side, size in zip(_SIDES, (rows, columns), strict=True):
        if size <= most:
            state[f"{side}_factor"], state[f"{side}_basis"] = zeros(size, size), zeros(size, size)
    return state


# -- one step -------------------------------------------------------------------------------------


def start(state: State, gradient: torch.Tensor, options: Mapping[str, Any]) -> None:
    """Fill preconditioners by the first gradient, and compute their eigenvectors.

    The gradient is not used further: no basis would be free of it.
    """
    _move_factors(state, gradient, options)
    for side in _sides(state):
        state[f"{side}_basis"].copy_(first_basis(state[f"{side}_factor"]))


def update_of(
    state: State, gradient: torch.Tensor, options: Mapping[str, Any], step: int
) -> torch.Tensor:
    """Return by what a matrix is to change, before ``lr``; ``step``: the number of the update."""
    beta1, beta2 = options["betas"]
    average, squares = (state[name] for name in AVERAGES)
    rotated = _rotated(state, gradient)
    average.mul_(beta1).add_(gradient, alpha=1 - beta1)
    squares.mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
    direction = _rotated(state, average).div_(squares.sqrt().add_(options["eps"]))
    update = _rotated_back(state, direction)
    _move_factors(state, gradient, options)
    if step % options["precondition_frequency"] == 0:
        _move_bases(state)
    return update.mul_(math.sqrt(1 - beta2**step) / (1 - beta1**step))


def flops_of(rows: int, columns: int, most: int, frequency: int) -> int:
    """Return about how many additions and multiplications a step of a matrix needs."""
    sides = [size for size in (rows, columns) if size <= most]
    return sum(8 * rows * columns * size + 8 * size**3 // frequency for size in sides)


def _sides(state: State) -> list[str]:
    return [side for side in _SIDES if f"{side}_factor" in state]


def _rotated(state: State, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``Q_L.T @ matrix @ Q_R``, a new tensor."""
    rotated = matrix.clone()
    if "row_basis" in state:
        rotated = state["row_basis"].mT @ rotated
    return rotated @ state["column_basis"] if "column_basis" in state else rotated


def _rotated_back(state: State, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``Q_L @ matrix @ Q_R.T``."""
    if "row_basis" in state:
        matrix = state["row_basis"] @ matrix
    return matrix @ state["column_basis"].mT if "column_basis" in state else matrix


def _move_factors(state: State, gradient: torch.Tensor, options: Mapping[str, Any]) -> None:
    beta = options["shampoo_beta"]
    beta = options["betas"][1] if beta is None else beta
    for side in _sides(state):
        outer = gradient @ gradient.mT if side == "row" else gradient.mT @ gradient
        state[f"{side}_factor"].lerp_(outer, 1 - beta)


def _move_bases(state: State) -> None:
    for side in _sides(state):
        factor, basis = state[f"{side}_factor"], state[f"{side}_basis"]
        order = falling_order(factor, basis)
        basis.copy_(next_basis(factor, basis[:, order]))
        squares = state["exp_avg_sq"]
        squares.copy_(squares.index_select(0 if side == "row" else 1, order))
