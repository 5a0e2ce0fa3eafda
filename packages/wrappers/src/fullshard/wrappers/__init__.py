"""Front doors for existing code. Owns no engine: every door opens on ``fullshard.sharding``.

``fullshard.wrappers.fsdp`` has the names of torch's ``fully_shard``; ``fullshard.wrappers.fsdp1``
and ``fullshard.wrappers.wrap`` those of PyTorch's FSDP1. ``install()`` puts them under libraries.
"""

from fullshard.wrappers.equivalent import equivalent_calls
from fullshard.wrappers.fsdp1 import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.wrappers.install import Installed, install, uninstall

__version__ = "0.1.0"

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "Installed",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "equivalent_calls",
    "install",
    "uninstall",
]
