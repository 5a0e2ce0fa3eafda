"""Names of ``fullshard.comm`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.comm.buffers.buffers import BlockPool, Buffer, BufferSource
from fullshard.comm.buffers.idle import IDLE
from fullshard.comm.buffers.packing import pack_gradients
from fullshard.comm.collectives.gather import FullTensors, OwnShards
from fullshard.comm.collectives.in_place import (
    SharedGatherInFlight,
    SharedTensors,
    foreach_all_gather_in_place,
)
from fullshard.comm.collectives.lost_ranks import raise_located
from fullshard.comm.collectives.reduce import ReducePlan
from fullshard.comm.collectives.replicas import AllReduceInFlight, SecondReduceInFlight
from fullshard.comm.installed import EXTENSIONS, TRANSPORTS, import_installed
from fullshard.comm.layouts.layout import PacksItself, pieces_of, rank_major
from fullshard.comm.layouts.scaling import backend_averages, op_name
from fullshard.comm.layouts.views import full_views, own_mask, shard_views
from fullshard.comm.runtime.carriers import carrier_of, host_carrier_of
from fullshard.comm.runtime.command_line import CommandParser
from fullshard.comm.runtime.compat import (
    backend_names,
    default_store,
    foreach_copy,
    foreach_lerp,
    foreach_norm,
    foreach_scale,
    timeout_of,
    without_grad,
)
from fullshard.comm.runtime.devices import DeviceTraits, can_pin, simulated, traits_of
from fullshard.comm.runtime.host_reads import host_reads_by, host_values
from fullshard.comm.runtime.observer import (
    CHECKS,
    LISTENERS,
    TIMELINES,
    WATCHERS,
    Launch,
    Mark,
    emit,
    mark,
    marked_wait,
    marked_work,
)
from fullshard.comm.runtime.process_exit import finish_threads_at_exit
from fullshard.comm.runtime.process_watch import (
    ProcessWatch,
    host_identity,
    record_process,
    this_process,
)
from fullshard.comm.runtime.ranges import NOTHING, is_profiled, named_range
from fullshard.comm.runtime.required import require
from fullshard.comm.runtime.streams import Stream, StreamEvent
from fullshard.comm.runtime.works import SeveralWorks, awaited
from fullshard.comm.transports.all_to_all import all_to_all, exchange, is_served
from fullshard.comm.transports.collective import EPOCH, Route
from fullshard.comm.transports.contribution import Contribution, Rows, Span
from fullshard.comm.transports.default import DEFAULTS, default_transport
from fullshard.comm.transports.rank_order import check_reduction, is_reduction, reduce_in_rank_order

__all__ = [
    "CHECKS",
    "DEFAULTS",
    "EPOCH",
    "EXTENSIONS",
    "IDLE",
    "LISTENERS",
    "NOTHING",
    "TIMELINES",
    "TRANSPORTS",
    "WATCHERS",
    "AllReduceInFlight",
    "BlockPool",
    "Buffer",
    "BufferSource",
    "CommandParser",
    "Contribution",
    "DeviceTraits",
    "FullTensors",
    "Launch",
    "Mark",
    "OwnShards",
    "PacksItself",
    "ProcessWatch",
    "ReducePlan",
    "Route",
    "Rows",
    "SecondReduceInFlight",
    "SeveralWorks",
    "SharedGatherInFlight",
    "SharedTensors",
    "Span",
    "Stream",
    "StreamEvent",
    "all_to_all",
    "awaited",
    "backend_averages",
    "backend_names",
    "can_pin",
    "carrier_of",
    "check_reduction",
    "default_store",
    "default_transport",
    "emit",
    "exchange",
    "finish_threads_at_exit",
    "foreach_all_gather_in_place",
    "foreach_copy",
    "foreach_lerp",
    "foreach_norm",
    "foreach_scale",
    "full_views",
    "host_carrier_of",
    "host_identity",
    "host_reads_by",
    "host_values",
    "import_installed",
    "is_profiled",
    "is_reduction",
    "is_served",
    "mark",
    "marked_wait",
    "marked_work",
    "named_range",
    "op_name",
    "own_mask",
    "pack_gradients",
    "pieces_of",
    "raise_located",
    "rank_major",
    "record_process",
    "reduce_in_rank_order",
    "require",
    "shard_views",
    "simulated",
    "this_process",
    "timeout_of",
    "traits_of",
    "without_grad",
]
