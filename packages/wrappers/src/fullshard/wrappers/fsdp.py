"""The one import line for code written against ``torch.distributed.fsdp``'s ``fully_shard``.

Owns no code: torch's names, from the layers that define them. In the import line, write
``fullshard.wrappers.fsdp`` for ``torch.distributed.fsdp``; nothing else changes.
"""

from fullshard.comm import AllGather, ReduceScatter
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.sharding import (
    DataParallelMeshDims,
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
