"""Ranks of one host share memory: nothing is sent between them through sockets.

Owns ``SharedMemoryTransport``, and the choice of a transport that becomes the default of
``fullshard.comm`` when this package is imported: shared memory where all ranks of a process group
can map it, ``AllToAllTransport`` for gloo between hosts, and the process group's own elsewhere.
"""

from fullshard.comm.spi import DEFAULTS, IDLE
from fullshard.samehost.all_to_all import AllToAllTransport
from fullshard.samehost.automatic import (
    AutomaticTransport,
    SharedMemoryStatistics,
    reset_shared_memory,
    same_host_transport,
    set_shared_memory,
    shared_memory_statistics,
)
from fullshard.samehost.frames import release_frames, set_shared_frames
from fullshard.samehost.memory import SharedMemoryTransport
from fullshard.samehost.signals import SharedMemoryError

__version__ = "0.1.0"

DEFAULTS.append(AutomaticTransport())
IDLE.append(release_frames)

__all__ = [
    "AllToAllTransport",
    "AutomaticTransport",
    "SharedMemoryError",
    "SharedMemoryStatistics",
    "SharedMemoryTransport",
    "reset_shared_memory",
    "same_host_transport",
    "set_shared_frames",
    "set_shared_memory",
    "shared_memory_statistics",
]
