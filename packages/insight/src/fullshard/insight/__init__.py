"""Measurements of sharded models: statistics of groups, and the ranks that others wait for.

Owns ``statistics`` and ``SlowRanks``. Both read the counters and marks of ``fullshard.comm`` and
``fullshard.sharding``, and change nothing in a step.
"""

from fullshard.insight.model_statistics import (
    GroupStatistics,
    ShardingStatistics,
    reset_statistics,
    statistics,
)
from fullshard.insight.own_times import OwnTimes, Phase
from fullshard.insight.slow_ranks import (
    LastRank,
    SlowRank,
    SlowRanks,
    SlowRanksReport,
    compare_ranks,
)

__version__ = "0.1.0"

__all__ = [
    "GroupStatistics",
    "LastRank",
    "OwnTimes",
    "Phase",
    "ShardingStatistics",
    "SlowRank",
    "SlowRanks",
    "SlowRanksReport",
    "compare_ranks",
    "reset_statistics",
    "statistics",
]
