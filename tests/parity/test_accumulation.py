"""Every way of mixing forwards and backwards gives the gradients of the unsharded model.

A scenario is one function, run on the sharded model with this rank's rows and on the unsharded one
with all rows; what is said to a sharded model only goes through ``tell``. Each runs twice, with an
optimizer step in between, so that what it leaves behind would show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from support.parity.compare import EXACT, assert_equal, gradients_of, parameters_of, rounding
from support.parity.engines import OURS, TORCH, Engine, shard, tell
from support.parity.models import CASES, Case, build
from support.parity.reference import Rows, adamw, my_rows, rows_of, whole_batch
from support.products import few
from support.ranks import distributed

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


@dataclass
class Run:
    """One model at work on its rows."""

    model: nn.Module
    case: Case
    rows: Rows

    def loss(self, micro: int) -> torch.Tensor:
        """The loss of batch ``micro``."""
        inputs, targets = rows_of(self.case.batch(micro, torch.float64), self.rows)
        return self.case.loss(self.model(inputs), targets)


Scenario = Callable[[Run], None]


def _announced(*methods: str) -> Scenario:
    """Three backwards, of which each is announced by these methods as the last one or not."""

    def scenario(run: Run) -> None:
        for micro in range(3):
            for method in methods:
                tell(run.model, method, micro == 2)
            run.loss(micro).backward()

    return scenario


def _several_forwards_one_backward(run: Run) -> None:
    torch.stack([run.loss(micro) for micro in range(3)]).sum().backward()


def _several_forwards_several_backwards(run: Run) -> None:
    first, second, third = (run.loss(micro) for micro in range(3))
    second.backward()
    first.backward()
    third.backward()


def _several_backwards_not_synchronised(run: Run) -> None:
    losses = [run.loss(micro) for micro in range(3)]
    for micro, loss in enumerate(losses):
        tell(run.model, SYNC, micro == 2)
        loss.backward()


def _retained_graph_twice(run: Run) -> None:
    loss = run.loss(0)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def _retained_graph_with_a_forward_between(run: Run) -> None:
    loss = run.loss(0)
    loss.backward(retain_graph=True)
    run.loss(1).backward()
    loss.backward()


def _dropped_forwards(run: Run) -> None:
    run.loss(1)
    kept = run.loss(0)
    run.loss(2)
    kept.backward()
    run.loss(1)


def _evaluation_between(run: Run) -> None:
    with torch.no_grad():
        run.loss(5)
    loss = run.loss(0)
    with torch.no_grad():
        run.loss(5)
    loss.backward()
    with torch.inference_mode():
        run.loss(5)
    run.loss(1).backward()


def _unsharded_by_hand(run: Run) -> None:
    for module in run.model.modules():
        tell(module, "unshard")
    run.loss(0).backward()
    for module in run.model.modules():
        tell(module, "reshard")
    tell(run.model, "unshard", async_op=True)
    loss = run.loss(1)
    tell(run.model, "reshard")
    loss.backward()


SYNC, WAITS = "set_requires_gradient_sync", "set_is_last_backward"
RESHARDS = "set_reshard_after_backward"
SCENARIOS: dict[str, Scenario] = {
    "synchronised": _announced(),
    "not-synchronised": _announced(SYNC),
    "not-resharded-after-backward": _announced(RESHARDS, SYNC),
    "not-resharded-but-synchronised": _announced(RESHARDS),
    "last-backward-waits-for-all": _announced(WAITS),
    "not-last-and-not-synchronised": _announced(WAITS, SYNC),
    "several-forwards-one-backward": _several_forwards_one_backward,
    "several-forwards-several-backwards": _several_forwards_several_backwards,
    "several-backwards-not-synchronised": _several_backwards_not_synchronised,
    "retained-graph-twice": _retained_graph_twice,
    "retained-graph-with-a-forward-between": _retained_graph_with_a_forward_between,
    "dropped-forwards": _dropped_forwards,
    "evaluation-between": _evaluation_between,
    "unsharded-by-hand": _unsharded_by_hand,
}
# Among four ranks, and in other models, those that differ most; the rest of them is in the matrix.
FEW = {
    "synchronised",
    "not-synchronised",
    "last-backward-waits-for-all",
    "several-forwards-several-backwards",
    "retained-graph-with-a-forward-between",
}
MORE = {
    *(FEW - {"synchronised"}),
    "not-resharded-after-backward",
    "dropped-forwards",
    "evaluation-between",
    "unsharded-by-hand",
}
OTHERS = ("tied-across-groups", "twice", "transformer-nested")  # shared, nested and listed modules


def _rounds(scenario: Scenario, run: Run) -> list[dict[str, torch.Tensor | None]]:
    optimizer = adamw(run.model)
    seen = []
    for _ in range(2):
        scenario(run)
        seen.append(gradients_of(run.model))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, parameters_of(run.model)]


def _sharded(
    name: str, case: str, engine: Engine, reshard: bool | None
) -> list[dict[str, torch.Tensor | None]]:
    model = shard(CASES[case], engine, dtype=torch.float64, reshard_after_forward=reshard)
    return _rounds(SCENARIOS[name], Run(model, CASES[case], my_rows()))


def _check(name: str, case: str, reshard: bool | None, world_size: int) -> None:
    got = _sharded(name, case, OURS, reshard)
    whole = Run(build(CASES[case], torch.float64), CASES[case], whole_batch)
    want = _rounds(SCENARIOS[name], whole)
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        # three batches add up in each round
        assert_equal(mine, theirs, rounding(world_size, steps=3 * (step + 1)), f"step {step}")


@pytest.mark.parametrize(
    ("case", "reshard", "name"),
    few(
        [
            *itertools.product(["transformer"], [True, False], SCENARIOS),
            *itertools.product(OTHERS, [None], SCENARIOS),
        ],
        *itertools.product(["transformer"], [True], MORE),
        *itertools.product(OTHERS[:1], [None], FEW),
        together=True,
    ),
)
@distributed(2)
def test_two_ranks_have_the_gradients_of_the_whole_batch(
    case: str, reshard: bool | None, name: str, world_size: int
) -> None:
    _check(name, case, reshard, world_size)


@pytest.mark.parametrize("name", few(SCENARIOS, *FEW))
@distributed(4)
def test_four_ranks_have_the_gradients_of_the_whole_batch(name: str, world_size: int) -> None:
    _check(name, "uneven-list", None, world_size)


# After a forward without backward torch leaves the root unsharded; ours returns what a graph held.
@pytest.mark.parametrize(
    "name",
    few(
        sorted(SCENARIOS.keys() - {"dropped-forwards"}),
        "not-synchronised",
        "several-forwards-several-backwards",
        "retained-graph-with-a-forward-between",
    ),
)
@distributed(2)
def test_each_scenario_equals_torch_to_the_last_bit(name: str) -> None:
    got = _sharded(name, "transformer", OURS, None)
    want = _sharded(name, "transformer", TORCH, None)
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert_equal(mine, theirs, EXACT, f"step {step}")
