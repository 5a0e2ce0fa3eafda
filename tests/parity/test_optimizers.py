"""Every dense optimizer of ``torch.optim``, in every mode, steps a sharded model as any other.

The table below names all of them, and fails when torch adds one, drops one or learns a mode: then
say here whether it works.
"""

from __future__ import annotations

import enum
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.sharding import fully_shard
from support.parity.compare import Tolerance, assert_equal, parameters_of, rounding
from support.products import few
from support.ranks import cpu_mesh, distributed

STEPS = 4
LR = 0.02


class Support(enum.Enum):
    """What becomes of one mode of one optimizer on a ``DTensor``."""

    WORKS = "it works"
    REFUSED = "torch itself raises"


WORKS, REFUSED = Support.WORKS, Support.REFUSED


@dataclass(frozen=True, kw_only=True)
class Row:
    """One optimizer.

    Attributes:
        modes: what becomes of each mode that its constructor knows.
        options: for the constructor; ``eps`` as large as ``lr`` keeps rounding from being blown up.
        even: torch takes only shards of one size.
        matrices: it takes only parameters with two dimensions.
        slack: how exact its own arithmetic is, where that is not the parameters'.
    """

    modes: dict[str, Support]
    options: dict[str, Any] = field(default_factory=dict)
    even: bool = False
    matrices: bool = False
    slack: Tolerance | None = None


_TWO = {"plain": WORKS, "foreach": WORKS}
_THREE = {**_TWO, "fused": WORKS}
_EPS = {"eps": LR}
RPROP = WORKS if torch.__version__ >= "2.15" else REFUSED

TABLE: dict[str, Row] = {
    "ASGD": Row(modes=_TWO),
    "Adadelta": Row(modes=_TWO, options=_EPS),
    "Adafactor": Row(modes={"plain": REFUSED, "foreach": REFUSED}),
    "Adagrad": Row(modes={**_TWO, "fused": REFUSED}, options=_EPS),
    "Adam": Row(modes=_THREE, options={**_EPS, "amsgrad": True}),
    "AdamW": Row(modes=_THREE, options=_EPS),
    "Adamax": Row(modes=_TWO, options=_EPS),
    # Each step searches along a direction built from differences of gradients: few and short ones.
    "LBFGS": Row(modes={"plain": WORKS}, options={"max_iter": 2}, even=True),
    # Its orthogonalisation runs in bf16, over shards in another order; each of its steps, five by
    # default, multiplies an error by up to 3.4.
    "Muon": Row(
        modes={"plain": WORKS},
        options={"ns_steps": 2},
        even=True,
        matrices=True,
        slack=Tolerance(units=3, overrides=torch.bfloat16),
    ),
    "NAdam": Row(modes=_TWO, options=_EPS),
    "RAdam": Row(modes=_TWO, options=_EPS),
    "RMSprop": Row(modes=_TWO, options={**_EPS, "momentum": 0.9, "centered": True}),
    "Rprop": Row(modes={"plain": RPROP, "foreach": REFUSED}),
    "SGD": Row(modes={**_TWO, "fused": REFUSED}, options={"momentum": 0.9, "nesterov": True}),
}
SPARSE_ONLY = {"SparseAdam"}

ALL = [(name, mode) for name, row in TABLE.items() for mode in row.modes]
WORKING = [name for name, row in TABLE.items() if WORKS in row.modes.values()]


def _optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    found = {name: getattr(torch.optim, name) for name in dir(torch.optim)}
    return {
        name: value
        for name, value in found.items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }


def test_the_table_names_every_optimizer_of_torch() -> None:
    assert _optimizers().keys() == TABLE.keys() | SPARSE_ONLY


def test_the_table_names_every_mode_of_every_optimizer() -> None:
    for name, optimizer in _optimizers().items():
        known = {"foreach", "fused"} & inspect.signature(optimizer).parameters.keys()
        if name not in SPARSE_ONLY:
            assert TABLE[name].modes.keys() == {"plain", *known}, name


def _make(name: str, mode: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = _optimizers()[name]
    options: dict[str, Any] = {"lr": LR, **TABLE[name].options}
    modes = {"foreach", "fused"} & inspect.signature(optimizer).parameters.keys()
    options.update({each: each == mode for each in modes})
    return optimizer(parameters, **options)


def _model(name: str) -> nn.Sequential:
    torch.manual_seed(11)
    row = TABLE[name]
    width = 8 if row.even else 7
    bias = not row.matrices
    return nn.Sequential(
        nn.Linear(6, width, bias=bias), nn.Tanh(), nn.Linear(width, 4 if row.even else 3, bias=bias)
    ).double()


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    sharded = model[0].weight.__class__ is not nn.Parameter  # type: ignore[index]  # a Sequential

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        loss = loss.detach()
        if sharded:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return float(loss)

    for _ in range(STEPS):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _torch_refuses(name: str, mode: str) -> str:
    """What torch says to this optimizer on its own DTensors; empty if it steps them."""
    parameters = [
        nn.Parameter(distribute_tensor(parameter.detach(), cpu_mesh(), [Shard(0)]))
        for parameter in _model(name).parameters()
    ]
    for parameter in parameters:
        parameter.grad = distribute_tensor(
            torch.ones(parameter.shape).double(), cpu_mesh(), [Shard(0)]
        )
    try:
        optimizer = _make(name, mode, parameters)
        for _ in range(2):
            optimizer.step(lambda: 1.0)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", few(WORKING, "AdamW", "LBFGS", "Muon", "SGD"))
@distributed(2, 4, matrix=[4])
def test_it_steps_like_on_the_unsharded_model_in_every_mode(name: str, world_size: int) -> None:
    for mode, support in TABLE[name].modes.items():
        if support is WORKS:
            _compare(name, mode, world_size)


def _compare(name: str, mode: str, world_size: int) -> None:
    model, whole = _model(name), _model(name)
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(12)).double()
    rank, each = dist.get_rank(), 8 // world_size
    _steps(model, _make(name, mode, list(model.parameters())), x[rank * each : (rank + 1) * each])
    before = parameters_of(whole)
    _steps(whole, _make(name, mode, list(whole.parameters())), x)
    got, want = parameters_of(model), parameters_of(whole)
    slack = TABLE[name].slack or rounding(world_size, steps=4 * STEPS)
    for parameter, value in want.items():
        start = before[parameter]
        assert value is not None
        assert start is not None
        moved = (value - start).abs().max().item()
        assert moved > 3 * slack.of(value), f"{parameter} moved by {moved}: nothing is shown"
    assert_equal(got, want, slack, f"{name}, {mode}")


@distributed(2)
def test_what_the_table_calls_refused_torch_refuses_on_its_own_tensors() -> None:
    for name, mode in ALL:
        refusal = _torch_refuses(name, mode)
        said = TABLE[name].modes[mode]
        assert bool(refusal) == (said is REFUSED), f"{name}, {mode}: {refusal or 'it works'}"
