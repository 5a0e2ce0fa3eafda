"""Finds the ``FSDPParam`` and the group of a tensor: of a sharded parameter, or one it replaced.

Owns the attribute on the tensor that says so. It refuses to know groups: ``group_of`` returns one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from fullshard.sharding.base.generation import ParameterGeneration
from fullshard.sharding.params.param import FSDPParam

__all__ = ["Owner", "OwningGroup", "owner_of", "set_owner"]

_ATTRIBUTE = "_fullshard_owner"


class OwningGroup(Protocol):
    """What a parameter's tensors need to know of its group."""

    @property
    def device(self) -> torch.device:
        """Where its modules compute."""
        ...

    @property
    def generation(self) -> ParameterGeneration:
        """Which version of its parameters there is."""
        ...


@dataclass(frozen=True)
class Owner:
    """Who shards a parameter."""

    param: FSDPParam
    group: OwningGroup

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copies and pickles as None: a copy of a sharded parameter is an ordinary ``DTensor``."""
        return type(None), ()


def owner_of(param: torch.Tensor) -> Owner | None:
    """Returns who shards ``param``, given the sharded parameter or the one that it replaced."""
    owner: Owner | None = getattr(param, _ATTRIBUTE, None)
    return owner


def set_owner(param: nn.Parameter, owner: Owner) -> None:
    """Makes ``owner_of(param)`` return ``owner``."""
    setattr(param, _ATTRIBUTE, owner)
