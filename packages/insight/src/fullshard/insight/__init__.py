"""Measurements and checks of sharded models: statistics, slow ranks, debug mode, integrity.

Owns ``statistics`` and ``SlowRanks``, which read the counters and marks of ``fullshard.comm`` and
``fullshard.sharding``. In ``debug_mode`` ranks compare each collective before they launch it, and
``GatherChecks`` checks each group. ``IntegrityChecks`` finds damaged numbers, with or without
replica groups. None changes the values of a step.
"""

from fullshard.insight.counting import CommStatistics, StatisticsObserver
from fullshard.insight.debugging import debug_mode, set_debug_mode
from fullshard.insight.gather_checks import GatherChecks, ParametersChangedError
from fullshard.insight.integrity.checks import IntegrityChecks, IntegrityPolicy
from fullshard.insight.integrity.findings import DamagedNumbersError, Finding
from fullshard.insight.model_statistics import (
    GroupStatistics,
    ShardingStatistics,
    reset_statistics,
    statistics,
)
from fullshard.insight.own_times import OwnTimes, Phase
from fullshard.insight.reads import set_gather_on_read
from fullshard.insight.slow_ranks import (
    LastRank,
    SlowRank,
    SlowRanks,
    SlowRanksReport,
    compare_ranks,
)
from fullshard.sharding import EXTENSIONS

__version__ = "0.1.0"

EXTENSIONS.append(GatherChecks)

__all__ = [
    "CommStatistics",
    "DamagedNumbersError",
    "Finding",
    "GatherChecks",
    "GroupStatistics",
    "IntegrityChecks",
    "IntegrityPolicy",
    "LastRank",
    "OwnTimes",
    "ParametersChangedError",
    "Phase",
    "ShardingStatistics",
    "SlowRank",
    "SlowRanks",
    "SlowRanksReport",
    "StatisticsObserver",
    "compare_ranks",
    "debug_mode",
    "reset_statistics",
    "set_debug_mode",
    "set_gather_on_read",
    "statistics",
]
