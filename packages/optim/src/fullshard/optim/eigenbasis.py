"""The eigenbasis of a preconditioner, and its next one by a power iteration and a QR.

N. Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv 2409.11321), algorithm
4. Eigenvectors are fixed only up to signs and order. Here eigenvalues are sorted in falling order.
The largest component of each first vector is positive, and the diagonal of R too. Therefore equal
preconditioners have equal bases, independently of the signs that a factorisation returns.
"""

from __future__ import annotations

import torch

__all__ = ["falling_order", "first_basis", "next_basis"]


def first_basis(factor: torch.Tensor) -> torch.Tensor:
    """Return the eigenvectors of a symmetric matrix ``[n, n]`` as columns, eigenvalues falling.

    The computation uses fp64. Of a matrix with infinities or NaN all are NaN, as Adam's averages
    would be: an error on the owner alone would leave the other ranks waiting.
    """
    if not factor.isfinite().all():
        return torch.full_like(factor, torch.nan)
    vectors = torch.linalg.eigh(factor.double()).eigenvectors.flip(1)
    largest = vectors.abs().argmax(dim=0, keepdim=True)
    signed: torch.Tensor = vectors * _signs(vectors.gather(0, largest))
    return signed.to(factor.dtype)


def falling_order(factor: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return the order of the columns of ``basis`` in which their eigenvalues fall.

    Eigenvalues are estimated by the diagonal of ``basis.T @ factor @ basis``, as in the authors'
    program; what is equal keeps its order.
    """
    estimates = (basis * (factor @ basis)).sum(dim=0)
    return estimates.argsort(descending=True, stable=True)


def next_basis(factor: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return a basis closer to the eigenvectors of ``factor`` than ``basis`` is."""
    q, r = torch.linalg.qr(factor @ basis)
    signed: torch.Tensor = q * _signs(r.diagonal())
    return signed


def _signs(numbers: torch.Tensor) -> torch.Tensor:
    return torch.where(numbers < 0, -1.0, 1.0).to(numbers.dtype)
