"""What a sharded model starts from, is saved as and loaded from, on any mesh.

Owns initial values that no mesh changes, and optimizer state as a state dict that does not depend
on how a model is sharded: gathered, scattered and cut anew. It refuses to touch a training step.
"""

from fullshard.checkpoint.initialise import InitFn, initialise
from fullshard.checkpoint.optim_state import (
    flatten_sharded_optim_state_dict,
    full_optim_state_dict,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from fullshard.checkpoint.options import (
    OptimStateKeyType,
    OptimStateKind,
    OptimStateOptions,
    optim_state_options,
    set_optim_state_options,
)

__all__ = [
    "InitFn",
    "OptimStateKeyType",
    "OptimStateKind",
    "OptimStateOptions",
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "initialise",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "optim_state_options",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "set_optim_state_options",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
]
