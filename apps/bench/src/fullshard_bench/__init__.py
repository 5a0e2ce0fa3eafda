"""The benchmark of fullshard: what sharding costs, across mesh sizes, against its rivals.

Owns measuring, and showing what was measured. It is an application: no library code may import it,
and it uses fullshard only through its public names. These names are what a user's own model or
contestant is made of.
"""

from fullshard_bench.arena import Arena
from fullshard_bench.settings import Settings
from fullshard_bench.training import Trainee
from fullshard_bench.workload import Shape, Workload

__all__ = ["Arena", "Settings", "Shape", "Trainee", "Workload"]
