"""Fully sharded data parallel training: ``fully_shard`` and the state machines behind it.

Owns parameters, groups, modules, and the protocols that policies answer. It refuses to know any
policy.
"""

from fullshard.sharding.agreement import RankMismatchError
from fullshard.sharding.averaging import ExponentialMovingAverage
from fullshard.sharding.clip import clip_grad_norm_, grad_norm
from fullshard.sharding.debug import debug_mode, set_debug_mode
from fullshard.sharding.fully_shard import fully_shard
from fullshard.sharding.leases import LeaseKind
from fullshard.sharding.mesh import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from fullshard.sharding.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.sharding.optim_state import (
    flatten_sharded_optim_state_dict,
    full_optim_state_dict,
    optim_state_dict,
    optim_state_dict_to_load,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from fullshard.sharding.optim_state_kind import (
    OptimStateKeyType,
    OptimStateKind,
    OptimStateOptions,
    optim_state_options,
    set_optim_state_options,
)
from fullshard.sharding.param import FSDPParam
from fullshard.sharding.param_group import FSDPParamGroup
from fullshard.sharding.placements import ShardPlacementFnResult, ShardPlacementResult
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
    require,
)
from fullshard.sharding.replicate import ReplicateModule, replicate
from fullshard.sharding.retired import rebind_optimizer
from fullshard.sharding.state_dict import full_state_dict, load_full_state_dict
from fullshard.sharding.states import ShardedState, TrainingState
from fullshard.sharding.statistics import GroupStatistics, ShardingStatistics
from fullshard.sharding.tensors import map_tensors
from fullshard.sharding.torch_objects import CPUStaging, FieldPrecision, converted, torchs_class
from fullshard.sharding.unsharded import unsharded

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
    "OptimStateKeyType",
    "OptimStateKind",
    "OptimStateOptions",
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
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "full_state_dict",
    "fully_shard",
    "grad_norm",
    "load_full_state_dict",
    "map_tensors",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "optim_state_options",
    "rebind_optimizer",
    "register_fsdp_forward_method",
    "rekey_optim_state_dict",
    "replicate",
    "require",
    "scatter_full_optim_state_dict",
    "set_debug_mode",
    "set_optim_state_options",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "share_comm_ctx",
    "torchs_class",
    "unsharded",
]
