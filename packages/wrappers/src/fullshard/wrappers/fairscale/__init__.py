"""The import line for code written against FairScale's ``FullyShardedDataParallel``.

Owns the names. Write ``fullshard.wrappers.fairscale`` for ``fairscale.nn``, or for one of its
``data_parallel``, ``wrap`` and ``checkpoint``, or of ``fairscale.internal``'s
``reduce_scatter_bucketer`` and ``parallel``.
"""

from fullshard.wrappers.fairscale.auto_wrap import (
    auto_wrap,
    auto_wrap_bn,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from fullshard.wrappers.fairscale.checkpoint import checkpoint_wrapper
from fullshard.wrappers.fairscale.equivalent import equivalent_calls
from fullshard.wrappers.fairscale.fully_sharded_data_parallel import (
    FullyShardedDataParallel,
    get_fsdp_instances,
)
from fullshard.wrappers.fairscale.reduce_scatter_bucketer import ReduceScatterBucketer
from fullshard.wrappers.fairscale.settings import FairScaleSettings, ProcessGroupName

__all__ = [
    "FairScaleSettings",
    "FullyShardedDataParallel",
    "ProcessGroupName",
    "ReduceScatterBucketer",
    "auto_wrap",
    "auto_wrap_bn",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "equivalent_calls",
    "get_fsdp_instances",
    "wrap",
]
