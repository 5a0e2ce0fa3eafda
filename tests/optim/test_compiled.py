"""Compiled steps on ranks that exchange are the eager ones, and a rank that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.optim import SOAP, AdamW8bit, ExponentialMovingAverage, Muon
from fullshard.sharding import RankMismatchError
from support.optim.given import Result, assert_same
from support.optim.shapes import Shapes, gradients, groups_of
from support.optim.ways import WAYS, Way, full_state, full_values, give
from support.optim.wide import Wide, wide_gradients
from support.parity.compare import assert_equal, rounding
from support.products import few
from support.ranks import distributed

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

_Make = Callable[[nn.Module], Any]

MATRICES: dict[str, _Make] = {
    "muon": lambda model: Muon(groups_of(model)),
    "soap": lambda model: SOAP(groups_of(model, "soap"), precondition_frequency=1),
}
ROWS, COLUMNS = WAYS["two"], Way(2, WAYS["columns"].shard)


def _steps(make: _Make, way: Way, module: type[nn.Module], backend: str | None) -> Result:
    """What three steps leave; ``backend``: None: they are not compiled."""
    torch.compiler.reset()
    model = module()
    way.apply(model)
    optimizer = make(model)
    average = ExponentialMovingAverage(model, 0.5)

    def step() -> None:
        optimizer.step()
        average.update()

    run = step if backend is None else torch.compile(step, backend=backend)
    for number in range(3):
        give(model, (wide_gradients if module is Wide else gradients)(number), way)
        run()
    with average.swapped():
        averages = {f"average of {name}": value for name, value in full_values(model).items()}
    return {**full_values(model), **averages}, full_state(model, optimizer)


@pytest.mark.parametrize("backend", few(["eager", "inductor"], "eager"))
@pytest.mark.parametrize("name", MATRICES)
@distributed(2)
def test_a_compiled_step_of_matrices_is_the_eager_one_to_the_last_bit(
    name: str, backend: str
) -> None:
    eager, compiled = (_steps(MATRICES[name], COLUMNS, Shapes, how) for how in (None, backend))
    assert_same(compiled[0], eager[0])
    assert_same(compiled[1], eager[1])


@pytest.mark.matrix
@distributed(2, timeout=180)
def test_a_compiled_step_of_8_bit_adamw_is_the_eager_one_but_for_rounding() -> None:
    """Torch corrects the bias of averages in fp32 where it compiles, and in fp64 elsewhere."""

    def make(model: nn.Module) -> AdamW8bit:
        return AdamW8bit(model.parameters(), lr=0.01)

    eager, compiled = (_steps(make, ROWS, Wide, how) for how in (None, "eager"))
    assert_equal(compiled[0], eager[0], rounding(2, steps=3), "parameters")
    codes = {name: state["exp_avg"] for name, state in eager[1].items()}
    assert_same({name: state["exp_avg"] for name, state in compiled[1].items()}, codes)


@pytest.mark.parametrize("name", MATRICES)
@distributed(2)
def test_a_compiled_step_raises_on_all_ranks_what_the_eager_one_does(name: str) -> None:
    torch.compiler.reset()
    model = Shapes()
    ROWS.apply(model)
    optimizer = MATRICES[name](model)
    step: Callable[[], Any] = torch.compile(optimizer.step, backend="eager")
    give(model, gradients(0), ROWS)
    step()
    if dist.get_rank() == 1:
        model.get_parameter("square").grad = None
    with pytest.raises(RankMismatchError, match="rank 0 has square of shape"):
        step()
    dist.barrier()
