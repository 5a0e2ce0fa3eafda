"""The matrices of a parameter: itself, one per expert, and the projections fused in it.

Owns which box of a whole parameter is a matrix, and the rule by which fused projections are split.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.checkpoint.spi import Box
from fullshard.optim.base.stepped import label_of

__all__ = ["Split", "matrices_of", "matrix_shape", "require_matrices", "split_sizes"]

Split = int | tuple[int, ...] | None
"""How many equal matrices a parameter holds along a dim, or how long each is; None: it is one."""


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a matrix, which may have a dim of experts before."""
    return shape[-2], shape[-1]


def split_sizes(length: int, split: Split, what: str) -> tuple[int, ...]:
    """Return the lengths of the matrices in a dim of ``length`` indices.

    Raises:
        ValueError: if ``split`` does not divide ``length``, or its sizes do not add up to it.
    """
    if split is None:
        return (length,)
    if isinstance(split, int):
        if split < 1 or length % split:
            raise ValueError(
                f"split is {split}, but {what} has {length} indices along split_dim; pass a number "
                "that divides them, or the size of each matrix"
            )
        return (length // split,) * split
    if sum(split) != length or min(split) < 1:
        raise ValueError(
            f"split is {split}, which adds up to {sum(split)}, but {what} has {length} indices "
            "along split_dim; pass positive sizes that add up to them"
        )
    return split


def matrices_of(shape: Sequence[int], split: Split, split_dim: int, what: str) -> list[Box]:
    """Return the box of each matrix in a parameter of ``shape`` ``[(experts,) rows, columns]``.

    Args:
        shape: that of the whole parameter.
        split: the rule for fused projections.
        split_dim: the dim in which the matrices are concatenated: 0, its rows, or 1.
        what: the parameter, for errors.

    Raises:
        ValueError: if the rule does not fit the shape.
    """
    dim = len(shape) - 2 + split_dim
    sizes = split_sizes(shape[dim], split, what)
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    whole = Box.whole(shape)
    each = [whole.along(0, at, 1) for at in range(shape[0])] if len(shape) == 3 else [whole]
    return [
        box.along(dim, start, size)
        for box in each
        for start, size in zip(starts, sizes, strict=True)
    ]


def require_matrices(group: Mapping[str, Any], name: str) -> None:
    """Raise ``ValueError`` unless all parameters of ``group`` are matrices of real numbers.

    Args:
        group: with ``params``, ``split`` and ``split_dim``.
        name: the optimizer, for errors.
    """
    for param in group["params"]:
        if param.ndim not in (2, 3) or param.is_complex():
            raise ValueError(
                f"{name} got {label_of(param)} of shape {tuple(param.shape)} and {param.dtype}, "
                "and takes matrices, [rows, columns] or [experts, rows, columns]; put "
                "it into a group with algorithm='adamw', as matrix_groups(model) does"
            )
        matrices_of(param.shape, group["split"], group["split_dim"], label_of(param))
