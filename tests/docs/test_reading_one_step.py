"""The page that walks through one step names functions that run, in the order in which they run."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from support.members import ROOT

PAGE = ROOT / "docs" / "concepts" / "reading-one-step.md"
PHASES = ("Sharding", "Forward", "Backward", "Optimizer")

# One rank of eight over the fake backend: a step of the page's model, its calls as they come.
PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from fullshard.sharding import fully_shard

calls = {}

def record(phase, run):
    seen = calls.setdefault(phase, [])
    def note(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and "/src/fullshard/" in file:
            seen.append(file.split("/src/fullshard/")[1] + ":" + frame.f_code.co_qualname)
    sys.setprofile(note)
    try:
        return run()
    finally:
        sys.setprofile(None)

dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
blocks = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)) for _ in range(3)]
model = nn.Sequential(*blocks)

def shard():
    for block in blocks:
        fully_shard(block)
    fully_shard(model)

record("Sharding", shard)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    calls = {"Sharding": calls["Sharding"]}
    loss = record("Forward", lambda: model(torch.ones(4, 512)).square().mean())
    record("Backward", loss.backward)
    record("Optimizer", optimizer.step)
    optimizer.zero_grad()
print(json.dumps(calls))
"""


@pytest.fixture(scope="module")
def calls() -> dict[str, list[str]]:
    """The engine's calls by phase, in order."""
    path = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=path, capture_output=True, text=True, check=True
    )
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


def _listed(phase: str) -> list[str]:
    """The functions that the page's section names, in its order."""
    (section,) = re.findall(rf"(?ms)^## {phase}$(.*?)(?=^## |\Z)", PAGE.read_text())
    return re.findall(r"(?m)^\d+\. `([\w/]+\.py:[\w.<>]+)`", section)


@pytest.mark.parametrize("phase", PHASES)
def test_what_a_section_lists_runs_in_that_order(phase: str, calls: dict[str, list[str]]) -> None:
    listed = _listed(phase)
    assert len(listed) >= 2
    rest = iter(calls[phase])
    for name in listed:
        assert name in calls[phase], f"{name} does not run in this phase"
        assert any(call == name for call in rest), f"{name} runs before what is listed above it"


def test_every_file_that_the_page_names_is_there() -> None:
    files = set(re.findall(r"`((?:comm|sharding)/[\w/]+\.py)", PAGE.read_text()))
    assert files
    assert [file for file in files if not list(ROOT.glob(f"packages/*/src/fullshard/{file}"))] == []
