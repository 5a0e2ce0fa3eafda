"""``torch.amp.GradScaler`` on sharded models: it scales, and all ranks skip a step alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.parity.compare import EXACT, assert_equal, parameters_of, rounding
from support.parity.engines import OURS, TORCH, Engine, shard
from support.parity.models import CASES, build
from support.parity.reference import my_rows, rows_of
from support.ranks import distributed

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

NAME, DTYPE = "uneven", torch.float64


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


class _Run:
    """A model, its optimizer and its scaler."""

    def __init__(self, model: nn.Module, rows: slice) -> None:
        self.model, self.rows, self.scaler = model, rows, _scaler()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def backward(self, step: int, factor: float = 1.0) -> None:
        inputs, targets = rows_of(CASES[NAME].batch(step, DTYPE), self.rows)
        loss = CASES[NAME].loss(self.model(inputs), targets)
        self.scaler.scale(loss * factor).backward()

    def step(self) -> float:
        """Steps, and returns the next scale."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.get_scale()


def _sharded(engine: Engine = OURS) -> _Run:
    return _Run(shard(CASES[NAME], engine, dtype=DTYPE), my_rows())


@distributed(2, 4, matrix=[4])
def test_scaled_steps_equal_the_unsharded_models(world_size: int) -> None:
    run, whole = _sharded(), _Run(build(CASES[NAME], DTYPE), slice(None))
    for step in range(5):
        scales = []
        for each in (run, whole):
            each.backward(step)
            scales.append(each.step())
        assert scales[0] == scales[1]
    assert scales[0] == 8.0 * 4
    allowed = rounding(world_size, steps=6)
    assert_equal(parameters_of(run.model), parameters_of(whole.model), allowed, "parameters")


@pytest.mark.cross
@pytest.mark.parametrize("unscaled_first", [True, False])
@distributed(2, 4, matrix=[4])
def test_a_loss_that_is_infinite_on_one_rank_makes_all_ranks_skip_and_then_go_on(
    unscaled_first: bool, world_size: int
) -> None:
    """As torch's own does: both engines are stepped beside each other."""
    runs = _sharded(OURS), _sharded(TORCH)
    for step in range(4):
        scales = []
        for run in runs:
            before = parameters_of(run.model)
            bad = step == 1 and dist.get_rank() == world_size - 1
            run.backward(step, float("inf") if bad else 1.0)
            if unscaled_first:
                run.scaler.unscale_(run.optimizer)
            scales.append(run.step())
            after = parameters_of(run.model)
            moved = [not torch.equal(before[name], after[name]) for name in after]  # type: ignore[arg-type]  # no None
            assert all(moved) if step != 1 else not any(moved)
        assert scales[0] == scales[1]
    slack = EXACT if world_size == 2 else rounding(world_size, steps=4)
    assert_equal(parameters_of(runs[0].model), parameters_of(runs[1].model), slack, "parameters")


@pytest.mark.parametrize("where", ["first", "last"])
@distributed(2, 4, matrix=[4])
def test_an_infinity_in_one_ranks_shard_is_seen_by_the_ranks_that_do_not_have_it(
    where: str, world_size: int
) -> None:
    run = _sharded()
    run.backward(0)
    before = parameters_of(run.model)
    weight = run.model.get_submodule(where).get_parameter("bias")
    grad = weight.grad
    assert grad is not None
    local = grad.to_local()  # type: ignore[attr-defined]  # a DTensor
    if dist.get_rank() == 0:
        local[0] = float("inf")
    assert run.step() == 4.0
    assert_equal(parameters_of(run.model), before, EXACT, "parameters")
