"""The page that walks through one step names functions that run, in the order in which they run."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.sharding import fully_shard
from support.members import ROOT
from support.ranks import run_on_ranks
from support.wide.fake import fake_world

PAGE = ROOT / "docs" / "concepts" / "reading-one-step.md"
SHARED = ROOT / "docs" / "concepts" / "shared-memory.md"
PHASES = ("Forward", "Backward", "Optimizer")
STOPS = 20
WORDS = 1200

Calls = dict[str, list[str]]


def trace_step() -> Calls:
    """Return the engine's calls in the second step of a small model, by phase, in order."""
    calls: Calls = {}

    def record(phase: str, run: Callable[[], Any]) -> Any:
        seen = calls.setdefault(phase, [])

        def note(frame: Any, event: str, argument: Any) -> None:
            file = frame.f_code.co_filename
            if event == "call" and "/src/fullshard/" in file:
                seen.append(f"{file.split('/src/fullshard/')[1]}:{frame.f_code.co_qualname}")

        sys.setprofile(note)
        try:
            return run()
        finally:
            sys.setprofile(None)

    width = 512
    blocks = [
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(3)
    ]
    model = nn.Sequential(nn.Linear(width, width), *blocks)  # so the root has parameters, too
    for each in (*blocks, model):
        fully_shard(each)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        calls.clear()
        loss = record("Forward", lambda: model(torch.ones(4, width)).square().mean())
        record("Backward", loss.backward)
        record("Optimizer", optimizer.step)
        optimizer.zero_grad()
    return calls


@functools.cache
def _on_two_ranks() -> Calls:
    return run_on_ranks(trace_step, 2)[0]


@functools.cache
def _over_a_process_group() -> Calls:
    """One rank of eight over the fake backend, which shares no memory."""
    with fake_world(8):
        return trace_step()


def _listed(section: str, page: Path = PAGE) -> list[str]:
    """Return the functions that a section of a page names, in its order."""
    (text,) = re.findall(rf"(?ms)^## {section}$(.*?)(?=^## |\Z)", page.read_text())
    return re.findall(r"(?m)^\d+\. `([\w/]+\.py:[\w.<>]+)`", text)


def _assert_in_order(listed: list[str], calls: list[str]) -> None:
    assert listed
    rest = iter(calls)
    for name in listed:
        assert name in calls, f"{name} does not run in this phase"
        assert any(call == name for call in rest), f"{name} runs before what is listed above it"


@pytest.mark.parametrize("phase", PHASES)
def test_what_a_section_lists_runs_in_that_order_over_a_process_group(phase: str) -> None:
    _assert_in_order(_listed(phase), _over_a_process_group()[phase])


def test_what_differs_where_ranks_share_memory_runs_in_that_order_there_alone() -> None:
    listed = _listed("The stops that differ", SHARED)
    shared, other = _on_two_ranks(), _over_a_process_group()
    _assert_in_order(listed, [*shared["Forward"], *shared["Backward"]])
    assert not set(listed) & {*other["Forward"], *other["Backward"]}


def test_a_reader_follows_few_stops() -> None:
    assert sum(len(_listed(phase)) for phase in PHASES) <= STOPS


def test_a_reader_has_few_words_to_read() -> None:
    assert len(PAGE.read_text().split()) <= WORDS


@pytest.mark.parametrize("page", [PAGE, SHARED], ids=lambda page: page.stem)
def test_every_file_that_the_page_names_is_there(page: Path) -> None:
    files = set(re.findall(r"`((?:comm|sharding|samehost)/[\w/]+\.py)", page.read_text()))
    assert files
    assert [file for file in files if not list(ROOT.glob(f"packages/*/src/fullshard/{file}"))] == []


def test_every_method_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"\b([A-Z_]\w+)\.(\w+)\b(?!\.md)", PAGE.read_text()))
    sources = "\n".join(path.read_text() for path in ROOT.glob("packages/*/src/**/*.py"))
    classes = re.split(r"(?m)^class ", sources)
    found = {
        (name, method)
        for name, method in named
        for text in classes
        if re.match(rf"{name}\b", text) and re.search(rf"\bdef {method}\(", text)
    }
    assert named
    assert named - found == set()
