"""Collectives over lists of tensors: uneven shards of any mix of dtypes, moved in one launch.

Owns: layouts, views, collectives and what they compose (transport, allocator), streams, events,
scaling. The package knows tensors, layouts and process groups. Refuses: parameters, modules and
policies: ``fullshard.sharding`` builds those on top.
"""

from __future__ import annotations

from fullshard.comm.buffers.allocator import (
    Allocator,
    CachingAllocator,
    ProcessGroupAllocator,
    SymmetricMemoryAllocator,
)
from fullshard.comm.buffers.buffers import BufferPool
from fullshard.comm.collectives.gather import (
    AllGatherInFlight,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from fullshard.comm.collectives.lists import all_gather_tensors, reduce_scatter_tensors
from fullshard.comm.collectives.lost_ranks import PeerLostError
from fullshard.comm.collectives.reduce import ReducedShards, ReduceInFlight, foreach_reduce
from fullshard.comm.collectives.replicas import all_reduce_shards
from fullshard.comm.layouts.layout import BufferSpec, Layout, TensorSpec
from fullshard.comm.layouts.scaling import ReduceOp, ReduceScaling, reduction_scaling
from fullshard.comm.runtime.marked_blocks import file_access, waiting
from fullshard.comm.runtime.observer import (
    CollectiveMismatchError,
    Event,
    EventKind,
    EventLog,
    Observer,
    check_collective,
    observe,
)
from fullshard.comm.runtime.streams import CommStreams
from fullshard.comm.transports.collective import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ReduceScatter,
)
from fullshard.comm.transports.config import GatherConfig, ReduceConfig
from fullshard.comm.transports.contribution import PartsReducer
from fullshard.comm.transports.default import (
    default_all_gather,
    default_reduce_scatter,
)
from fullshard.comm.transports.transport import (
    GatherBuffer,
    ProcessGroupTransport,
    SelfTransport,
    Transport,
)

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "AllGatherInFlight",
    "Allocator",
    "BufferPool",
    "BufferSpec",
    "CachingAllocator",
    "CollectiveMismatchError",
    "CommStreams",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "Event",
    "EventKind",
    "EventLog",
    "GatherBuffer",
    "GatherConfig",
    "Layout",
    "Observer",
    "PartsReducer",
    "PeerLostError",
    "ProcessGroupAllocator",
    "ProcessGroupTransport",
    "ReduceConfig",
    "ReduceInFlight",
    "ReduceOp",
    "ReduceScaling",
    "ReduceScatter",
    "ReducedShards",
    "SelfTransport",
    "SymmetricMemoryAllocator",
    "TensorSpec",
    "Transport",
    "all_gather_tensors",
    "all_reduce_shards",
    "check_collective",
    "default_all_gather",
    "default_reduce_scatter",
    "file_access",
    "foreach_all_gather",
    "foreach_all_gather_copy_out",
    "foreach_reduce",
    "observe",
    "reduce_scatter_tensors",
    "reduction_scaling",
    "waiting",
]
