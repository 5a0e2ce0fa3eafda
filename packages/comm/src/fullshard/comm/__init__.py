"""Collectives over lists of tensors: uneven shards of any mix of dtypes, moved in one launch.

Owns: layouts, views, collectives and what they compose (transport, allocator, codec), streams,
events, scaling. It knows tensors, layouts and process groups. Refuses: parameters, modules and
policies: ``fullshard.sharding`` builds those on top.
"""

from __future__ import annotations

import atexit

from fullshard.comm.buffers.allocator import (
    Allocator,
    CachingAllocator,
    ProcessGroupAllocator,
    SymmetricMemoryAllocator,
)
from fullshard.comm.buffers.buffers import BufferPool, Buffers, BufferSource, NewBuffers
from fullshard.comm.collectives.all_reduce import all_reduce_numbers
from fullshard.comm.collectives.composed import (
    DefaultAllGather,
    DefaultReduceScatter,
    default_all_gather,
    default_reduce_scatter,
)
from fullshard.comm.collectives.gather import (
    AllGatherInFlight,
    FullTensors,
    OwnShards,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_all_gather_discard,
)
from fullshard.comm.collectives.joining import joined_cap_mb, joining_pays, lanes_join
from fullshard.comm.collectives.lists import all_gather_tensors, reduce_scatter_tensors
from fullshard.comm.collectives.reduce import ReducedShards, ReduceInFlight, foreach_reduce
from fullshard.comm.collectives.replicas import AllReduceInFlight, ReplicaLane, all_reduce_shards
from fullshard.comm.debug.debug import (
    check_collective,
    debug_collectives,
    is_debugging,
    leave_collectives,
    resume_collectives,
    set_debug_collectives,
)
from fullshard.comm.debug.rollcall import CollectiveMismatchError
from fullshard.comm.layouts.layout import BufferSpec, Layout, Piece, Slot, TensorSpec
from fullshard.comm.layouts.rank_major import RankMajorLayout
from fullshard.comm.layouts.scaling import (
    ReduceOp,
    ReduceScaling,
    backend_averages,
    reduction_scaling,
)
from fullshard.comm.layouts.views import (
    full_views,
    gap_views,
    marks_view,
    piece_views,
    shard_shapes,
    shard_views,
    tensors_view,
)
from fullshard.comm.runtime.observer import (
    CommStatistics,
    Event,
    EventKind,
    EventLog,
    Observer,
    StatisticsObserver,
    emit,
    is_observed,
    observe,
)
from fullshard.comm.runtime.process_exit import let_threads_finish
from fullshard.comm.runtime.ranges import is_profiled, named_range
from fullshard.comm.runtime.streams import (
    CommStreams,
    NullEvent,
    NullStream,
    Stream,
    StreamEvent,
    canonical_device,
)
from fullshard.comm.same_host.same_host import (
    AutomaticTransport,
    same_host_transport,
    set_shared_memory,
)
from fullshard.comm.same_host.shared_buffers import (
    SharedGatherInFlight,
    SharedTensors,
    foreach_all_gather_in_place,
)
from fullshard.comm.same_host.shared_frames import set_shared_frames
from fullshard.comm.same_host.shared_memory import SharedMemoryTransport
from fullshard.comm.same_host.shared_signals import PeerLostError, SharedMemoryError
from fullshard.comm.same_host.shared_statistics import (
    SharedMemoryStatistics,
    shared_memory_statistics,
)
from fullshard.comm.transports.codec import CastCodec, Codec, IdentityCodec
from fullshard.comm.transports.collective import (
    AllGather,
    AllGatherLike,
    Comm,
    ReduceScatter,
    ReduceScatterLike,
    require_all_gather,
    require_reduce_scatter,
)
from fullshard.comm.transports.config import GatherLane, ReduceLane
from fullshard.comm.transports.contribution import Contribution, PartsReducer
from fullshard.comm.transports.exchange import ExchangeTransport
from fullshard.comm.transports.transport import (
    GatherBuffer,
    ProcessGroupTransport,
    SelfTransport,
    Transport,
)

__all__ = [
    "AllGather",
    "AllGatherInFlight",
    "AllGatherLike",
    "AllReduceInFlight",
    "Allocator",
    "AutomaticTransport",
    "BufferPool",
    "BufferSource",
    "BufferSpec",
    "Buffers",
    "CachingAllocator",
    "CastCodec",
    "Codec",
    "CollectiveMismatchError",
    "Comm",
    "CommStatistics",
    "CommStreams",
    "Contribution",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "Event",
    "EventKind",
    "EventLog",
    "ExchangeTransport",
    "FullTensors",
    "GatherBuffer",
    "GatherLane",
    "IdentityCodec",
    "Layout",
    "NewBuffers",
    "NullEvent",
    "NullStream",
    "Observer",
    "OwnShards",
    "PartsReducer",
    "PeerLostError",
    "Piece",
    "ProcessGroupAllocator",
    "ProcessGroupTransport",
    "RankMajorLayout",
    "ReduceInFlight",
    "ReduceLane",
    "ReduceOp",
    "ReduceScaling",
    "ReduceScatter",
    "ReduceScatterLike",
    "ReducedShards",
    "ReplicaLane",
    "SelfTransport",
    "SharedGatherInFlight",
    "SharedMemoryError",
    "SharedMemoryStatistics",
    "SharedMemoryTransport",
    "SharedTensors",
    "Slot",
    "StatisticsObserver",
    "Stream",
    "StreamEvent",
    "SymmetricMemoryAllocator",
    "TensorSpec",
    "Transport",
    "all_gather_tensors",
    "all_reduce_numbers",
    "all_reduce_shards",
    "backend_averages",
    "canonical_device",
    "check_collective",
    "debug_collectives",
    "default_all_gather",
    "default_reduce_scatter",
    "emit",
    "foreach_all_gather",
    "foreach_all_gather_copy_out",
    "foreach_all_gather_discard",
    "foreach_all_gather_in_place",
    "foreach_reduce",
    "full_views",
    "gap_views",
    "is_debugging",
    "is_observed",
    "is_profiled",
    "joined_cap_mb",
    "joining_pays",
    "lanes_join",
    "leave_collectives",
    "marks_view",
    "named_range",
    "observe",
    "piece_views",
    "reduce_scatter_tensors",
    "reduction_scaling",
    "require_all_gather",
    "require_reduce_scatter",
    "resume_collectives",
    "same_host_transport",
    "set_debug_collectives",
    "set_shared_frames",
    "set_shared_memory",
    "shard_shapes",
    "shard_views",
    "shared_memory_statistics",
    "tensors_view",
]

atexit.register(let_threads_finish)
