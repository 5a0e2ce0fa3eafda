"""The optimizer state of a wrapped model: FSDP1's static methods.

Owns their names and arguments only. What they do is ``fullshard.sharding``'s affair, and works on
any sharded model.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.sharding import OptimStateKeyType, optim_state

__all__ = ["OptimStateDicts"]

_StateDict = dict[str, Any]


class OptimStateDicts:
    """FSDP1's static methods about optimizer state.

    They take ids or names for keys, models that are wrapped in another way, and models that are not
    wrapped. Each does what the function of its name in ``fullshard.sharding`` does.
    """

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> _StateDict:
        """Returns the whole state of ``optim``, on the CPU, by names; call it on every rank."""
        return optim_state.full_optim_state_dict(model, optim, optim_input, rank0_only, group)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
    ) -> _StateDict:
        """Returns the state of ``optim`` by names, in which every part is a ``DTensor``."""
        return optim_state.sharded_optim_state_dict(model, optim, group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: _StateDict,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> _StateDict:
        """Returns this rank's part of a full state dict, for ``optim.load_state_dict``."""
        return optim_state.shard_full_optim_state_dict(
            full_optim_state_dict, model, optim_input, optim
        )

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: _StateDict, model: nn.Module, optim: Optimizer
    ) -> _StateDict:
        """Returns a sharded state dict for ``optim.load_state_dict``; call it on every rank."""
        return optim_state.flatten_sharded_optim_state_dict(sharded_optim_state_dict, model, optim)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: _StateDict | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> _StateDict:
        """Returns this rank's part of rank 0's state dict, for ``optim.load_state_dict``."""
        return optim_state.scatter_full_optim_state_dict(
            full_optim_state_dict, model, optim_input, optim, group
        )

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: _StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> _StateDict:
        """Returns ``optim_state_dict`` with names for ids, or ids for names."""
        return optim_state.rekey_optim_state_dict(
            optim_state_dict, optim_state_key_type, model, optim_input, optim
        )

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: _StateDict | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> _StateDict:
        """Returns the state of ``optim`` by names, of the kind that ``model`` is set to."""
        return optim_state.optim_state_dict(model, optim, optim_state_dict, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: _StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> _StateDict:
        """Returns what ``optim_state_dict`` gave in the form that ``optim.load_state_dict`` takes.

        Of the kind that ``model`` is set to.
        """
        return optim_state.optim_state_dict_to_load(
            model, optim, optim_state_dict, is_named_optimizer, load_directly, group
        )
