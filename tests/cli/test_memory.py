"""`fullshard memory`: what a killed run left in the memory of this host."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from fullshard.checkpoint import MemoryCheckpoints
from fullshard.cli.app import app


def test_runs_are_listed_and_removed_by_name(tmp_path: Path) -> None:
    memory = MemoryCheckpoints("job-7", folder=tmp_path)
    memory.save(3, {"w": torch.ones(2)}).result()
    given = ["memory", "--folder", str(tmp_path)]
    used = CliRunner().invoke(app, [*given, "--remove", "job-7"])
    assert used.exit_code == 2
    assert "is used by processes" in used.output
    memory.close()
    (listed,) = json.loads(CliRunner().invoke(app, [*given, "--json"]).output)
    assert (listed["name"], listed["steps"], listed["process_ids"]) == ("job-7", [3], [])
    assert "job-7" in CliRunner().invoke(app, given).output
    wrong = CliRunner().invoke(app, [*given, "--remove", "job-8"])
    assert wrong.exit_code == 2
    assert "there are: job-7" in wrong.output
    ended = CliRunner().invoke(app, [*given, "--remove", "job-7"])
    assert "no run has checkpoints" in ended.output
    assert not [*tmp_path.iterdir()]
