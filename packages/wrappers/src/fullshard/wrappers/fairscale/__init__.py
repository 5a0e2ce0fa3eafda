"""The import line for code written against FairScale's ``FullyShardedDataParallel``.

Owns the names. Write ``fullshard.wrappers.fairscale`` for ``fairscale.nn`` or
``fairscale.nn.data_parallel``.
"""

from fullshard.wrappers.fairscale.auto_wrap import (
    auto_wrap,
    default_auto_wrap_policy,
    enable_wrap,
    wrap,
)
from fullshard.wrappers.fairscale.equivalent import equivalent_calls
from fullshard.wrappers.fairscale.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.wrappers.fairscale.settings import FairScaleSettings

__all__ = [
    "FairScaleSettings",
    "FullyShardedDataParallel",
    "auto_wrap",
    "default_auto_wrap_policy",
    "enable_wrap",
    "equivalent_calls",
    "wrap",
]
