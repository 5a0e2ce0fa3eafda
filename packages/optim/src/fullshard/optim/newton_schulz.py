"""Newton-Schulz: the nearest semi-orthogonal matrix, roughly, by products of matrices in bf16.

The quintic iteration of K. Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024
(kellerjordan.github.io/posts/muon). X has a Frobenius norm of at most 1. An iteration computes
``X <- a X + (b A + c A A) X`` for ``A = X X^T``: an odd polynomial of the singular values, whose
coefficients push small ones up fast and leave all of them roughly between 0.7 and 1.2.
"""

from __future__ import annotations

import torch

__all__ = ["COEFFICIENTS", "flops_of", "orthogonalised"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Jordan's a, b and c."""


def orthogonalised(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return ``matrix`` (``[rows, columns]``) with its singular values pushed to about 1, in bf16.

    Args:
        matrix: any matrix; it is not changed.
        coefficients: a, b and c of the polynomial.
        steps: how many iterations.
        eps: the least norm by which it is divided.
    """
    a, b, c = coefficients
    x = matrix.to(torch.bfloat16)
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()


def flops_of(rows: int, columns: int, steps: int) -> int:
    """Return how many additions and multiplications ``orthogonalised`` needs."""
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)
