"""Fully sharded data parallel training: ``fully_shard`` and the state machines behind it.

Owns parameters, groups, modules, and the protocols that policies answer. It refuses to know any
policy.
"""

from fullshard.sharding.access.averaging import ExponentialMovingAverage
from fullshard.sharding.access.state_dict import full_state_dict, load_full_state_dict
from fullshard.sharding.access.unsharded import unsharded
from fullshard.sharding.api.fully_shard import fully_shard
from fullshard.sharding.api.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.sharding.api.placements import ShardPlacementFnResult, ShardPlacementResult
from fullshard.sharding.api.replicate import ReplicateModule, replicate
from fullshard.sharding.api.statistics import GroupStatistics, ShardingStatistics
from fullshard.sharding.base.comparison import RankMismatchError
from fullshard.sharding.base.leases import LeaseKind
from fullshard.sharding.base.required import require
from fullshard.sharding.base.states import ShardedState, TrainingState
from fullshard.sharding.base.tensors import map_tensors
from fullshard.sharding.base.torch_objects import (
    CPUStaging,
    FieldPrecision,
    converted,
    torchs_class,
)
from fullshard.sharding.groups.debug import debug_mode, set_debug_mode
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.mesh.mesh_info import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from fullshard.sharding.optim.clip import clip_grad_norm_, grad_norm
from fullshard.sharding.optim.rebinding import rebind_optimizer
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.protocols import (
    FixedReshard,
    FullPrecision,
    ModuleCasts,
    NoStaging,
    ParameterDTypes,
    PrecisionPolicy,
    PrefetchPolicy,
    ReshardPolicy,
    ReverseOrderPrefetch,
    Staging,
)

__all__ = [
    "CPUStaging",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "ExponentialMovingAverage",
    "FSDPMeshInfo",
    "FSDPModule",
    "FSDPParam",
    "FSDPParamGroup",
    "FieldPrecision",
    "FixedReshard",
    "FullPrecision",
    "GroupStatistics",
    "HSDPMeshInfo",
    "LeaseKind",
    "ModuleCasts",
    "NoStaging",
    "ParameterDTypes",
    "PrecisionPolicy",
    "PrefetchPolicy",
    "RankMismatchError",
    "ReplicateModule",
    "ReshardPolicy",
    "ReverseOrderPrefetch",
    "ShardPlacementFnResult",
    "ShardPlacementResult",
    "ShardedState",
    "ShardingStatistics",
    "Staging",
    "TrainingState",
    "UnshardHandle",
    "clip_grad_norm_",
    "converted",
    "debug_mode",
    "full_state_dict",
    "fully_shard",
    "grad_norm",
    "load_full_state_dict",
    "map_tensors",
    "rebind_optimizer",
    "register_fsdp_forward_method",
    "replicate",
    "require",
    "set_debug_mode",
    "share_comm_ctx",
    "torchs_class",
    "unsharded",
]

_MOVED = (
    "OptimStateKeyType",
    "OptimStateKind",
    "OptimStateOptions",
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "optim_state_options",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "set_optim_state_options",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
)


def __getattr__(name: str) -> object:
    """Says where a name that was here has gone."""
    if name in _MOVED:
        raise ImportError(
            f"{name} is in fullshard.checkpoint now (pip install fullshard-checkpoint): "
            f"from fullshard.checkpoint import {name}"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
