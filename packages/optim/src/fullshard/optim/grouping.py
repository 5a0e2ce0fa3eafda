"""Which parameters of a model are matrices for Muon, and which go to AdamW.

Owns the usual rule: hidden matrices are orthogonalised; embeddings, the head, biases, norms and
scalars are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

__all__ = ["matrix_groups"]


def matrix_groups(
    model: nn.Module,
    *,
    algorithm: str = "muon",
    exclude: Sequence[str] = (),
    adamw: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return groups of the parameters of ``model`` that train, for ``Muon`` or ``SOAP``.

    Matrices and 3-D experts in one group; embeddings, all that has another number of dims, and
    what ``exclude`` names in another, for AdamW. A weight that is tied to an embedding goes with
    it. Call it after ``fully_shard``, or before: both give the same.

    Args:
        model: the model.
        algorithm: of the matrices.
        exclude: patterns of full names, as ``"head.*"``, that go to AdamW, too.
        adamw: options of AdamW's group: ``lr``, ``weight_decay``, ``betas``, ``eps``.

    Raises:
        ValueError: if a pattern matches no parameter.
    """
    named = dict(model.named_parameters())
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ValueError(
                f"exclude has {pattern!r}, which matches no parameter of the model; names are like "
                f"{', '.join(list(named)[:3])}"
            )
    embeddings = {
        id(param)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for param in module.parameters(recurse=False)
    }
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, param in named.items():
        if not param.requires_grad:
            continue
        excluded = id(param) in embeddings or any(fnmatchcase(name, each) for each in exclude)
        (matrices if param.ndim in (2, 3) and not excluded else rest).append(param)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "algorithm": algorithm},
        {**(adamw or {}), "params": rest, "algorithm": "adamw"},
    ]
    return [group for group in groups if group["params"]]
