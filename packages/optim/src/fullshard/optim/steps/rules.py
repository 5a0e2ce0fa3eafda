"""Decide by its class how an optimizer may step: on local shards, or on whole parameters only.

torch's optimizers whose rule is elementwise step on shards as plain tensors; a norm of a whole
parameter is not that of a shard, so others keep ``DTensor``. Adafactor, which takes norms and means
and fails on a ``DTensor``, steps on plain tensors where every rank has all of each parameter, as
under ``replicate``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.sharding.spi import owner_of, spec_of

__all__ = ["steps_on_plain"]

# Exactly these: a subclass may do anything.
_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
_WHOLE = frozenset(
    {f"{optim.Adafactor.__module__}.Adafactor", "transformers.optimization.Adafactor"}
)


def steps_on_plain(kind: type[Optimizer], params: Iterable[torch.Tensor]) -> bool:
    """Return whether an optimizer of ``kind`` may step on local shards as plain tensors.

    Raises:
        TypeError: if it needs whole parameters and one of ``params`` is cut, as all ranks see it.
    """
    if f"{kind.__module__}.{kind.__qualname__}" not in _WHOLE:
        return kind in _ELEMENTWISE
    for param in params:
        owner = owner_of(param)
        if owner is not None and isinstance(param, DTensor) and _is_cut(param):
            raise TypeError(
                f"{kind.__name__} takes norms and means of whole parameters, but each rank has a "
                f"part of {owner.name}; step with an elementwise optimizer such as "
                "torch.optim.AdamW, or leave parameters whole with fullshard.sharding.replicate"
            )
    return True


def _is_cut(param: DTensor) -> bool:
    spec = spec_of(param)
    return any(
        size > 1 and not placement.is_replicate()
        for size, placement in zip(spec.mesh.shape, spec.placements, strict=True)
    )
