"""A process that ends while a thread of gloo's still holds a collective's tensors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from fullshard.comm.runtime.process_exit import let_threads_finish

# It ends right after it has launched collectives, whose tensors and group stay referred to: more of
# them than are through when the interpreter ends. The first one is ours, so we wait at the exit.
_PROGRAM = """
import sys
import torch
import torch.distributed as dist
from fullshard.comm import TensorSpec, all_gather_tensors

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
all_gather_tensors([torch.ones(100)], [TensorSpec(shape=(100,), dtype=torch.float32)],
                   dist.group.WORLD)
pairs = [([torch.empty(100)], torch.ones(100)) for _ in range(1000)]
sys.kept = dist.group.WORLD, pairs
for full, shard in pairs:
    dist.all_gather(full, shard, async_op=True)
"""


def test_a_process_that_ends_right_after_collectives_is_not_aborted() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_threads_that_are_not_of_gloo_are_not_waited_for() -> None:
    stop = threading.Event()
    other = threading.Thread(target=lambda: all(not stop.is_set() for _ in iter(int, 1)))
    other.start()
    try:
        start = time.monotonic()
        let_threads_finish()
        assert time.monotonic() - start < 20
    finally:
        stop.set()
        other.join()
