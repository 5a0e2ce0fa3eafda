"""Replica groups that leave and join a run without a restart.

fullshard shards inside a replica group; this package adds gradients across groups, carries the
state of the run to groups that join, and drops a step as a whole when a group is lost. torchft's
lighthouse and manager decide which groups take part.
"""

from fullshard.elastic.errors import ReplicaGroupError
from fullshard.elastic.groups import ElasticStep, ReplicaGroups
from fullshard.elastic.lighthouse import Lighthouse
from fullshard.elastic.membership import Coordinator, Quorum
from fullshard.elastic.options import ElasticOptions
from fullshard.elastic.reduction import ReplicaWire

__version__ = "0.1.0"

__all__ = [
    "Coordinator",
    "ElasticOptions",
    "ElasticStep",
    "Lighthouse",
    "Quorum",
    "ReplicaGroupError",
    "ReplicaGroups",
    "ReplicaWire",
]
