"""The package's README is run, block by block."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from support.ranks import run_on_ranks

README = Path(__file__).parents[2] / "packages" / "comm" / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run_example(code: str) -> None:
    """Run a block that starts and ends a process group, in the group that is there."""
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        exec(compile(code, str(README), "exec"), {"__name__": "__main__"})


def test_the_example_runs_on_two_ranks(capfd: object) -> None:
    first, *_ = BLOCKS
    assert "init_process_group" in first
    run_on_ranks(run_example, 2, first)


def test_the_other_blocks_run_on_their_own() -> None:
    _, *others = BLOCKS
    assert others
    for block in others:
        run_example(block)
