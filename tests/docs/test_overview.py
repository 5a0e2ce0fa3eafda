"""The overview picture shows what a step of the engine holds, and is what its script draws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fullshard.preflight import Category, Choice, Plan
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.models.workload import Shape
from fullshard_bench.planning.rows import Job, plan_whole
from support.members import ROOT
from support.tools import load_tool

TOOL = load_tool("overview")


@pytest.fixture(scope="module")
def figures() -> Any:
    return TOOL.figures()


@pytest.fixture(scope="module")
def planned() -> Plan:
    """A step of the model on a described GPU, its activations computed again in backward."""
    choice = Choice(dtype=torch.bfloat16, reduce_dtype=torch.float32, recompute=True)
    job = Job(
        model=TOOL.MODEL,
        shape=Shape(rows=1, tokens=2048),
        device="h100",
        mesh=parse_mesh(str(TOOL.RANKS)),
        choice=choice,
    )
    return plan_whole(job)


def test_the_file_is_what_the_script_draws(figures: Any) -> None:
    assert TOOL.PICTURE.read_text() == TOOL.draw(figures)


def test_shards_and_optimizer_state_are_those_of_the_engine(figures: Any, planned: Plan) -> None:
    assert planned.categories[Category.SHARDS] == figures.parameters
    state = planned.categories[Category.OPTIMIZER_STATE]
    assert math.isclose(state, figures.optimizer, rel_tol=1e-4)  # and counts of steps


def test_at_the_worst_moment_the_root_is_gathered_and_a_block_in_flight(
    figures: Any, planned: Plan
) -> None:
    gathered = planned.categories[Category.GATHERED]
    assert math.isclose(gathered, figures.root, rel_tol=1e-3)
    in_flight = planned.categories[Category.COLLECTIVES]  # the next block's, not copied out yet
    assert math.isclose(in_flight, figures.block, rel_tol=1e-3)


def test_gradients_are_those_of_the_engine(figures: Any, planned: Plan) -> None:
    assert planned.categories[Category.GRADIENTS] == 0  # the first block is being reduced
    assert planned.categories[Category.UNREDUCED] >= figures.reduction


def test_the_first_page_gives_the_plans_figures(planned: Plan) -> None:
    page = " ".join((ROOT / "docs" / "index.md").read_text().split())
    assert f"{planned.parameters / 1e9:.1f} billion parameters" in page
    assert f"holds at most {planned.peak / 2**30:.2f} GiB on each of {TOOL.RANKS} ranks" in page
    assert f"alone are {16 * planned.parameters / 2**30:.2f} GiB" in page
