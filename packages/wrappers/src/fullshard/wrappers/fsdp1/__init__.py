"""The one import line for code written against PyTorch's FSDP1.

Owns no code: FSDP1's names of ``torch.distributed.fsdp``, from the modules that define them. In the
import line, write ``fullshard.wrappers.fsdp1`` for ``torch.distributed.fsdp``, and
``fullshard.wrappers.wrap`` for ``torch.distributed.fsdp.wrap``; nothing else changes.
"""

from fullshard.checkpoint import (
    OptimStateKeyType,
)
from fullshard.wrappers.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.wrappers.fsdp1.settings import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from fullshard.wrappers.fsdp1.state_dicts.types import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]
