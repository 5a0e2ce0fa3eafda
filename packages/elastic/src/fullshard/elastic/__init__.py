"""Replica groups that leave and join a run without a restart, and checks of its numbers.

fullshard shards inside a replica group; this package adds gradients across groups, carries the
state of the run to groups that join, and drops a step as a whole when a group is lost. torchft's
lighthouse and manager decide which groups take part. ``IntegrityChecks`` finds damaged numbers,
with or without replica groups.
"""

from fullshard.elastic.errors import ReplicaGroupError
from fullshard.elastic.groups import ElasticStep, ReplicaGroups
from fullshard.elastic.integrity.checks import IntegrityChecks, IntegrityPolicy
from fullshard.elastic.integrity.findings import DamagedNumbersError, Finding
from fullshard.elastic.lighthouse import Lighthouse
from fullshard.elastic.membership import Coordinator, Quorum
from fullshard.elastic.options import ElasticOptions
from fullshard.elastic.reduction import ReplicaWire

__version__ = "0.1.0"

__all__ = [
    "Coordinator",
    "DamagedNumbersError",
    "ElasticOptions",
    "ElasticStep",
    "Finding",
    "IntegrityChecks",
    "IntegrityPolicy",
    "Lighthouse",
    "Quorum",
    "ReplicaGroupError",
    "ReplicaGroups",
    "ReplicaWire",
]
