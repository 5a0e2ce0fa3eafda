"""How an optimizer's state is given out: whole, in shards, where, and on which ranks.

Defines the options, and stores which options a model has. Other modules act on the options.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from enum import Enum, auto

from torch import nn

from fullshard.sharding.spi import require_bool

__all__ = [
    "OptimStateKeyType",
    "OptimStateKind",
    "OptimStateOptions",
    "optim_state_options",
    "set_optim_state_options",
]


class OptimStateKeyType(Enum):
    """By what an optimizer's state dict names parameters."""

    PARAM_NAME = auto()
    """By their full names, which do not depend on how a model is wrapped."""
    PARAM_ID = auto()
    """By their positions in the optimizer, as ``Optimizer.state_dict()`` does."""


class OptimStateKind(Enum):
    """How the state of a sharded parameter is represented."""

    FULL = auto()
    """Whole, plain tensors: those of the unsharded model."""
    SHARDED = auto()
    """``DTensor`` that are cut as the parameter is."""
    LOCAL = auto()
    """This rank's parts as plain tensors, for the same model on the same ranks.

    For one file per rank: ``torch.distributed.checkpoint`` would take them for replicas.
    """


@dataclass(frozen=True, kw_only=True)
class OptimStateOptions:
    """How ``optim_state_dict`` gives an optimizer's state, and in what form it is loaded.

    Attributes:
        kind: what stands for the state of a sharded parameter.
        offload_to_cpu: put the tensors on the CPU, each as soon as it is whole.
        rank0_only: give the state to the first rank only, and load it from there; full only.
    """

    kind: OptimStateKind = OptimStateKind.FULL
    offload_to_cpu: bool = True
    rank0_only: bool = False

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            TypeError: if one is of the wrong type.
            ValueError: if shards are wanted on the first rank only.
        """
        if not isinstance(self.kind, OptimStateKind):
            raise TypeError(f"kind is {self.kind!r}; pass a fullshard.checkpoint.OptimStateKind")
        require_bool("offload_to_cpu", self.offload_to_cpu)
        require_bool("rank0_only", self.rank0_only)
        if self.rank0_only and self.kind is not OptimStateKind.FULL:
            raise ValueError(
                f"rank0_only=True came with kind {self.kind.name}, of which each rank has its own "
                "part; pass OptimStateKind.FULL, or rank0_only=False"
            )


_told: weakref.WeakKeyDictionary[nn.Module, OptimStateOptions] = weakref.WeakKeyDictionary()


def set_optim_state_options(module: nn.Module, options: OptimStateOptions) -> OptimStateOptions:
    """Return the options that ``module`` had, after telling it and all below it ``options``.

    Raises:
        TypeError: if ``options`` is no ``OptimStateOptions``.
        ValueError: if modules below ``module`` have different options.
    """
    if not isinstance(options, OptimStateOptions):
        raise TypeError(f"options is a {type(options).__name__}; pass an OptimStateOptions")
    previous = optim_state_options(module)
    for each in module.modules():
        _told[each] = options
    return previous


def optim_state_options(module: nn.Module) -> OptimStateOptions:
    """Return the options of ``module`` or of the modules below it; the defaults if nothing.

    Raises:
        ValueError: if the modules have different options.
    """
    found = list(dict.fromkeys(_told[each] for each in module.modules() if each in _told))
    if len(found) > 1:
        raise ValueError(
            f"modules below {type(module).__name__} were told different options for their "
            f"optimizer state, {found[0]} and {found[1]}; call set_optim_state_options on it"
        )
    return found[0] if found else OptimStateOptions()
