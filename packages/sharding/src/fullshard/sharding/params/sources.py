"""What a parameter must be for ``fully_shard`` to take it.

Owns the checks of one parameter, which come before anything changes; where it is cut is not its
affair, nor what its hooks do.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.sharding.base.compat import local_shard

__all__ = ["GATHER_HOOKS", "has_hooks", "require_same_hooks", "require_shardable"]

# torch's names of the methods of a parameter, or of its local part, called around its gather
GATHER_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def require_shardable(name: str, param: nn.Parameter) -> None:
    """Returns if ``param`` can be sharded.

    Raises:
        ValueError: if not, naming it and saying what to do.
    """
    if param.layout != torch.strided:
        raise ValueError(f"{name} has layout {param.layout}; fully_shard takes strided parameters")
    has_hooks(name, _local(param))


def _local(param: torch.Tensor) -> torch.Tensor:
    return local_shard(param) if isinstance(param, DTensor) else param


def has_hooks(name: str, local: torch.Tensor) -> bool:
    """Tells whether this rank's part of the parameter ``name`` has hooks around its gather.

    Raises:
        ValueError: if it has one of the two.
    """
    before, after = (hasattr(local, hook) for hook in GATHER_HOOKS)
    if before == after:
        return before
    has, lacks = GATHER_HOOKS if before else GATHER_HOOKS[::-1]
    raise ValueError(
        f"{name} is a {type(local).__name__} with {has} but no {lacks}; define both or none"
    )


def require_same_hooks(name: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Returns if ``after``, made of ``before``, has hooks around its gather where that class has.

    Hooks that were put on one tensor object only may be lost, as the object is.

    Raises:
        ValueError: if they were lost.
    """
    kind, made = type(_local(before)), _local(after)
    if has_hooks(name, made) or not all(hasattr(kind, hook) for hook in GATHER_HOOKS):
        return
    raise ValueError(
        f"{name} was a {kind.__name__} and became a {type(made).__name__} without "
        f"{GATHER_HOOKS[0]}; make __torch_dispatch__ of {kind.__name__} keep the class in "
        "aten.split, aten.new_zeros, aten.detach and aten.empty_like, and load with assign=False"
    )
