"""Fully sharded data parallel training: ``fully_shard`` and the state machines behind it.

Owns parameters, groups, modules, and the protocols that policies answer. Policies are in
``fullshard.policies``.
"""

from fullshard.sharding.access.state_dict import full_state_dict, load_full_state_dict
from fullshard.sharding.access.unsharded import unsharded
from fullshard.sharding.api.extending import extend_groups
from fullshard.sharding.api.fully_shard import ReplicateModule, fully_shard, replicate
from fullshard.sharding.api.handles import GradientReductionHandle, UnshardHandle
from fullshard.sharding.api.managed import ShardPlacementFnResult, ShardPlacementResult
from fullshard.sharding.api.module import (
    FSDPModule,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.sharding.base.comparison import RankMismatchError
from fullshard.sharding.base.policies import (
    FieldPrecision,
    FullPrecision,
    OffloadToCPU,
    require,
)
from fullshard.sharding.base.states import LeaseKind, ShardedState, TrainingState
from fullshard.sharding.base.tensors import map_tensors
from fullshard.sharding.base.torch_objects import converted, torchs_class
from fullshard.sharding.extension import (
    EXTENSIONS,
    ROOT_EXTENSIONS,
    STEP_EXTENSIONS,
    ExtendedGroup,
    ExtendedParameter,
    GroupExtension,
    RootExtension,
    StepExtension,
)
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.schedule import SCHEDULES, Schedule
from fullshard.sharding.mesh.mesh_info import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from fullshard.sharding.mesh.placements import ShardingPlacements
from fullshard.sharding.optim.rebinding import rebind_optimizer
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.protocols import (
    FixedReshard,
    FullWidth,
    ModuleCasts,
    NoOffload,
    Offload,
    ParameterDTypes,
    PrecisionPolicy,
    PrefetchPolicy,
    ReshardPolicy,
    ReverseOrderPrefetch,
    WireForms,
)

__version__ = "0.1.0"

__all__ = [
    "EXTENSIONS",
    "ROOT_EXTENSIONS",
    "SCHEDULES",
    "STEP_EXTENSIONS",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "ExtendedGroup",
    "ExtendedParameter",
    "FSDPMeshInfo",
    "FSDPModule",
    "FSDPParam",
    "FSDPParamGroup",
    "FieldPrecision",
    "FixedReshard",
    "FullPrecision",
    "FullWidth",
    "GradientReductionHandle",
    "GroupExtension",
    "HSDPMeshInfo",
    "LeaseKind",
    "ModuleCasts",
    "NoOffload",
    "Offload",
    "OffloadToCPU",
    "ParameterDTypes",
    "PrecisionPolicy",
    "PrefetchPolicy",
    "RankMismatchError",
    "ReplicateModule",
    "ReshardPolicy",
    "ReverseOrderPrefetch",
    "RootExtension",
    "Schedule",
    "ShardPlacementFnResult",
    "ShardPlacementResult",
    "ShardedState",
    "ShardingPlacements",
    "StepExtension",
    "TrainingState",
    "UnshardHandle",
    "WireForms",
    "converted",
    "extend_groups",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "map_tensors",
    "rebind_optimizer",
    "register_fsdp_forward_method",
    "replicate",
    "require",
    "share_comm_ctx",
    "torchs_class",
    "unsharded",
]
