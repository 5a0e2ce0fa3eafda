"""The optimizer state of a wrapped model: FSDP1's static methods.

Owns their names only. The methods call the functions of ``fullshard.checkpoint``, which accept any
sharded model.
"""

from __future__ import annotations

from fullshard import checkpoint

__all__ = ["OptimStateDicts"]


class OptimStateDicts:
    """FSDP1's static methods about optimizer state.

    The methods accept ids or names as keys, models that are wrapped differently, and unwrapped
    models. Each method calls the function of its name in ``fullshard.checkpoint``.
    """

    full_optim_state_dict = staticmethod(checkpoint.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(checkpoint.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(checkpoint.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(checkpoint.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(checkpoint.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(checkpoint.rekey_optim_state_dict)
    optim_state_dict = staticmethod(checkpoint.optim_state_dict)
    optim_state_dict_to_load = staticmethod(checkpoint.optim_state_dict_to_load)
