"""Optimizers that must see whole parameters: Adafactor, which takes their norms and means.

Owns their names, and the error where a rank has a part of a parameter. They fail on a ``DTensor``;
where every shard is whole, as under ``replicate``, they step on plain tensors as others do.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import optim
from torch.distributed.tensor import DTensor

from fullshard.sharding.base.compat import spec_of
from fullshard.sharding.params.owner import owner_of

__all__ = ["needs_whole_parameters", "require_whole"]

_NAMES = frozenset(
    {f"{optim.Adafactor.__module__}.Adafactor", "transformers.optimization.Adafactor"}
)


def needs_whole_parameters(kind: type[optim.Optimizer]) -> bool:
    """Tells whether ``kind`` is an optimizer whose rule is one of whole parameters."""
    return f"{kind.__module__}.{kind.__qualname__}" in _NAMES


def require_whole(params: Iterable[torch.Tensor], kind: type[optim.Optimizer]) -> None:
    """Returns if each rank has all of every sharded parameter among ``params``.

    Raises:
        TypeError: if one is cut, as all ranks see it.
    """
    for param in params:
        owner = owner_of(param)
        if owner is not None and isinstance(param, DTensor) and _is_cut(param):
            raise TypeError(
                f"{kind.__name__} takes norms and means of whole parameters, but each rank has a "
                f"part of {owner.param.name}; step with an elementwise optimizer such as "
                "torch.optim.AdamW, or leave parameters whole with fullshard.sharding.replicate"
            )


def _is_cut(param: DTensor) -> bool:
    spec = spec_of(param)
    return any(
        size > 1 and not placement.is_replicate()
        for size, placement in zip(spec.mesh.shape, spec.placements, strict=True)
    )
