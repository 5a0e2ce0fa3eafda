"""Python in a process of its own, which imports what this one can, installed or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def environment(**more: str) -> dict[str, str]:
    """For such a process, with one thread; ``more`` comes on top."""
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def run_python(*words: str | Path, code: int = 0, **more: str) -> str:
    """What Python prints that is started with ``words``; it has to leave with ``code``."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment(**more), capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout
