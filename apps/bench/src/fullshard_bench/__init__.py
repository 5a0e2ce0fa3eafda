"""The benchmark of fullshard: what sharding costs, across mesh sizes, against its rivals.

Owns measuring, and showing what was measured. The package is an application: no library code may
import it, and it uses fullshard only through its public names. A user's own model or contestant
uses these names.
"""

from fullshard_bench.contestants.training import Trainee
from fullshard_bench.launching.arena import Arena
from fullshard_bench.models.workload import Shape, Workload
from fullshard_bench.settings import Settings

__version__ = "0.1.0"

__all__ = ["Arena", "Settings", "Shape", "Trainee", "Workload"]
