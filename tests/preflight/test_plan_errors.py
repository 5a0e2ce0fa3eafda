"""Errors of a plan, and its answers to the host's reads."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight import Plan, PlanError, plan
from fullshard.preflight.planning import reads
from support.modules import Assembled, in_turn

HERE = Path(__file__).name


def _model(compute: Any) -> nn.Module:
    """A model whose module ``body.inner`` computes something from its input."""
    inner = Assembled(lambda module, x: compute(module.layer(x)), layer=nn.Linear(8, 8))
    return in_turn(head=nn.Linear(8, 8), body=in_turn(inner=inner, tail=nn.Linear(8, 8)))


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).square().mean()
    return found


def _planned(compute: Any = nn.Identity(), loss: Any = _loss, **options: Any) -> Plan:  # noqa: B008
    build = partial(_model, compute)
    return plan(build, torch.empty(4, 8), loss, **{"mesh": 2, "device": "h100", **options})


class Chosen(torch.autograd.Function):
    """The identity, whose backward reads an index."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * int(gradients[0].argmax())


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda x: x[x.sum(1) > 0], "in forward of body.inner .*nonzero.* needs values"),
        (lambda x: x[: int(x.argmax())], "in forward of body.inner .*local_scalar_dense"),
        (lambda x: x if x.sum() > 3 else -x, "in forward of body.inner .*a variant that takes one"),
        (lambda x: x * float(x.detach().numpy().sum()), r"body.inner .*Tensor\.numpy\(\) needs"),
        (Chosen.apply, "in backward of body.inner .*local_scalar_dense"),
    ],
)
def test_a_plan_that_needs_a_value_names_the_module_and_the_line(compute: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said) as raised:
        _planned(compute)
    assert f"{HERE}:" in str(raised.value)
    assert not dist.is_initialized()


def test_in_the_loss_it_is_said_to_be_there() -> None:
    with pytest.raises(PlanError, match=rf"in the loss \(.*{HERE}:\d+\), .*local_scalar_dense"):
        _planned(loss=lambda model, x: _loss(model, x[: int(x.argmax())]))


def test_an_error_of_the_model_keeps_its_class_and_says_where_it_was() -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim") as raised:
        _planned(lambda x: x @ x)
    (note,) = raised.value.__notes__
    assert note.startswith("raised while forward of body.inner (")
    assert HERE in note


def _logged(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = _loss(model, x)
    read = loss.detach()
    assert math.log(read.item()) == 0.0
    assert f"{read:.2f}" == "1.00"
    return loss


def test_a_float_that_the_host_reads_is_one_and_the_report_names_the_lines() -> None:
    planned = _planned(loss=_logged)
    assert len(planned.reads) == 2
    assert all(HERE in line for line in planned.reads)
    assert f"floats that the host reads are 1.0 here: {planned.reads[0]}" in str(planned)
    plain = _planned()
    assert "the host reads" not in str(plain)
    assert planned.time is not None and plain.time is not None
    assert planned.time.step_time > plain.time.step_time, "the host waits for what it reads"


def _checked(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = _loss(model, x)
    assert not torch.isnan(loss).any()
    assert torch.isfinite(loss).all()
    if torch.isinf(loss) or loss != loss or (loss.isnan() | loss.isinf()).any():
        raise AssertionError
    assert loss.isnan().sum() == 0
    return loss


def test_checks_for_nan_find_none() -> None:
    assert not _planned(loss=_checked).reads


def test_a_check_that_is_changed_in_place_is_not_known_any_more() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = _loss(model, x)
        check = torch.isnan(found)
        check |= found > 3
        return found if check else -found

    with pytest.raises(PlanError, match=r"local_scalar_dense.* needs values"):
        _planned(loss=loss)


def _searched(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = _loss(model, x)
    while loss.item() > 0.5:
        loss = loss * 0.5
    return loss


def test_a_loop_that_waits_for_a_value_is_ended_with_its_line() -> None:
    with (
        patch.object(reads, "_MOST", 20),
        pytest.raises(PlanError, match=rf"{HERE}:\d+ read a float 20 times"),
    ):
        _planned(loss=_searched)


def test_a_lazy_module_is_refused_with_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"lazy module, such as nn\.LazyLinear, .* give the module"):
        plan(lambda: nn.LazyLinear(4), torch.empty(4, 8), _loss, mesh=2)
    lazy = nn.LazyLinear(4)
    with pytest.raises(PlanError, match="weight has no shape: a lazy module"):
        plan(lambda: lazy, torch.empty(4, 8), _loss, mesh=2)


def test_an_optimizer_that_needs_a_closure_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"a LBFGS, whose step\(\) needs a closure .*AdamW"):
        _planned(optimizer=torch.optim.LBFGS)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_model_is_planned_without_fusion_and_the_report_says_so() -> None:
    plain = _planned()

    def build() -> nn.Module:
        model: Any = _model(nn.Identity())
        model.body.compile()
        return model

    compiled = plan(build, torch.empty(4, 8), _loss, mesh=2, device="h100")
    assert (compiled.peak, compiled.step_time) == (plain.peak, plain.step_time)
    assert compiled.compiled
    assert "torch.compile fuses operations, which is not counted" in str(compiled)
    assert "torch.compile" not in str(plain)
