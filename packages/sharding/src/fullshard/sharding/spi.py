"""Names of ``fullshard.sharding`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.sharding.access.full_params import Mode
from fullshard.sharding.access.state_dict import require_between_steps
from fullshard.sharding.access.unsharded import in_block, on_any_rank, opened
from fullshard.sharding.base.checks import require_bool, require_cap, require_count
from fullshard.sharding.base.comparison import Comparison
from fullshard.sharding.base.compat import (
    ShardingSpec,
    current_graph_task,
    flatten,
    functorch_is_active,
    gradients_of,
    local_of,
    local_shard,
    local_shards,
    make_dtensor,
    make_spec,
    spec_of,
    specs_of,
    storage_of,
    untraced,
    version_of,
)
from fullshard.sharding.base.exchange import objects_of_ranks
from fullshard.sharding.base.forward_pass import ForwardPass
from fullshard.sharding.base.memory import addresses_of, set_data, storage_object
from fullshard.sharding.base.policies import declares
from fullshard.sharding.base.stand_ins import StandIns
from fullshard.sharding.base.states import BackwardStage
from fullshard.sharding.base.tensors import PLAIN, is_plain, tensors_in
from fullshard.sharding.gather.strategy import BufferedUnshard, GatherInputs, Holders
from fullshard.sharding.groups.param_group import group_of
from fullshard.sharding.hooks.context import RootContext
from fullshard.sharding.hooks.lookup import groups_of, initialised_state, state_of, the_states
from fullshard.sharding.hooks.module_state import ModuleState
from fullshard.sharding.hooks.schedule import ShardedModule, StepRecord
from fullshard.sharding.mesh.mesh_info import device_of_mesh, device_type_of
from fullshard.sharding.mesh.placements import EarlyReduction
from fullshard.sharding.mesh.subgroups import known_subgroup
from fullshard.sharding.optim.live_groups import Snapshot, are_same, params_in
from fullshard.sharding.params.lookup import owner_of, sharded_of
from fullshard.sharding.params.registry import registry_of
from fullshard.sharding.reduce.reduction import ReductionQueue
from fullshard.sharding.reduce.strategies import PlainReduce, ReadyReductions, ReductionSetup

__all__ = [
    "PLAIN",
    "BackwardStage",
    "BufferedUnshard",
    "Comparison",
    "EarlyReduction",
    "ForwardPass",
    "GatherInputs",
    "Holders",
    "Mode",
    "ModuleState",
    "PlainReduce",
    "ReadyReductions",
    "ReductionQueue",
    "ReductionSetup",
    "RootContext",
    "ShardedModule",
    "ShardingSpec",
    "Snapshot",
    "StandIns",
    "StepRecord",
    "addresses_of",
    "are_same",
    "current_graph_task",
    "declares",
    "device_of_mesh",
    "device_type_of",
    "flatten",
    "functorch_is_active",
    "gradients_of",
    "group_of",
    "groups_of",
    "in_block",
    "initialised_state",
    "is_plain",
    "known_subgroup",
    "local_of",
    "local_shard",
    "local_shards",
    "make_dtensor",
    "make_spec",
    "objects_of_ranks",
    "on_any_rank",
    "opened",
    "owner_of",
    "params_in",
    "registry_of",
    "require_between_steps",
    "require_bool",
    "require_cap",
    "require_count",
    "set_data",
    "sharded_of",
    "spec_of",
    "specs_of",
    "state_of",
    "storage_object",
    "storage_of",
    "tensors_in",
    "the_states",
    "untraced",
    "version_of",
]
