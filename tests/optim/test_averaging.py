"""Averages of a sharded model: those of the unsharded one, and their turn in the model's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fullshard.comm import EventLog, observe
from fullshard.optim import ExponentialMovingAverage
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.sharding import unsharded
from support.optim.given import assert_same
from support.parity.compare import full
from support.ranks import cpu_mesh, distributed
from support.surface.model import Net, batch, build, sharded, train
from support.surface.ranks import everyone, full_parameters

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _whole(averages: ExponentialMovingAverage) -> dict[str, torch.Tensor]:
    return {name: full(each) for name, each in averages.state_dict()["averages"].items()}


def _plain(values: dict[str, torch.Tensor]) -> Net:
    """The unsharded model with these values."""
    plain = build()
    plain.load_state_dict(values, strict=False)
    return plain


class Averaged:
    """torch's own average of the unsharded model, told the same values."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        rule = get_ema_multi_avg_fn(decay)
        self.model: Any = AveragedModel(_plain(full_parameters(model)), multi_avg_fn=rule)

    def update(self, model: nn.Module) -> None:
        self.model.update_parameters(_plain(full_parameters(model)))

    def values(self) -> dict[str, torch.Tensor]:
        return {name: each.detach() for name, each in self.model.module.named_parameters()}


ARGUMENTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bf16": {"mp_policy": MIXED},
    "kept": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("name", ARGUMENTS)
@distributed(2)
def test_averages_are_those_of_torchs_average_of_the_unsharded_model(name: str) -> None:
    model = sharded(build(), **ARGUMENTS[name])
    optimizer = _sgd(model)
    averages, torchs = ExponentialMovingAverage(model, 0.9), Averaged(model, 0.9)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        log = EventLog()
        with observe(log):
            averages.update()
        assert log.events == []
        torchs.update(model)
    assert_same(_whole(averages), torchs.values())


@distributed(2)
def test_what_stayed_unsharded_after_a_forward_without_gradients_is_averaged_all_the_same() -> None:
    model = sharded(build())
    averages, torchs = ExponentialMovingAverage(model, 0.5), Averaged(model, 0.5)
    optimizer = _sgd(model)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        torchs.update(model)
        with torch.no_grad():
            model(batch())
        assert not isinstance(model.head.weight, DTensor)  # torch's own lerp would mix here
        averages.update()
    assert_same(_whole(averages), torchs.values())


@pytest.mark.parametrize("name", ARGUMENTS)
@distributed(2)
def test_with_the_averages_in_its_place_the_model_computes_what_the_averaged_one_does(
    name: str,
) -> None:
    def run(*, averaged: bool) -> list[float]:
        model = sharded(build(), **ARGUMENTS[name])
        optimizer, losses = _sgd(model), []
        averages = ExponentialMovingAverage(model, 0.9)
        for step in range(3):
            losses += train(model, optimizer, range(step, step + 1))
            averages.update()
            with torch.no_grad():
                before = model(batch())  # leaves the root unsharded
                if not averaged:
                    continue
                with averages.swapped():
                    output, values = model(batch()), full_parameters_of(model)
                assert torch.equal(model(batch()), before)
            assert_same(values, _whole(averages))
            assert torch.equal(output, expected(values))
        return losses

    def full_parameters_of(model: Net) -> dict[str, torch.Tensor]:
        return {k: full(v) for k, v in model.state_dict().items() if k != "steps"}

    def expected(values: dict[str, torch.Tensor]) -> torch.Tensor:
        policy = {k: v for k, v in ARGUMENTS[name].items() if k == "mp_policy"}
        plain = sharded(_plain(values), **policy)  # whose values no average has touched
        with torch.no_grad():
            return plain(batch())

    assert run(averaged=True) == run(averaged=False)


@distributed(2)
def test_a_schedule_is_asked_with_the_number_of_updates_and_the_first_update_copies() -> None:
    asked: list[int] = []

    def decay(updates: int) -> float:
        asked.append(updates)
        return (1 + updates) / (10 + updates)

    model = sharded(build())
    averages = ExponentialMovingAverage(model, decay)
    expected: dict[str, torch.Tensor] = {}
    for step in range(3):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(step + 1)
        averages.update()
        now = full_parameters(model)
        weight = 1 - (1 + step) / (10 + step)
        expected = {k: v.lerp(now[k], weight) for k, v in expected.items()} or now
    assert averages.updates == 3 and asked == [0, 1, 2]
    assert_same(_whole(averages), expected)


@distributed(2)
def test_averages_of_bfloat16_may_be_kept_in_float32_and_come_back_unrounded() -> None:
    model = sharded(build().bfloat16())
    averages = ExponentialMovingAverage(model, 0.999, dtype=torch.float32, device="cpu")
    averages.update()
    start = _whole(averages)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    averages.update()
    kept, own = _whole(averages), full_parameters(model)
    assert all(each.dtype is torch.float32 for each in kept.values())
    assert all((kept[name] > start[name]).all() for name in kept)  # bfloat16 would not move
    with averages.swapped():
        assert_same(full_parameters(model), {k: v.bfloat16() for k, v in kept.items()})
    assert_same(full_parameters(model), own)
    assert_same(_whole(averages), kept)


@distributed(2)
def test_frozen_parameters_are_left_out_and_buffers_are_averaged_if_asked() -> None:
    model = build()
    model.stem.requires_grad_(False)
    sharded(model)
    averages = ExponentialMovingAverage(model, 0.5, use_buffers=True)
    names = list(averages.state_dict()["averages"])
    assert "steps" in names and not any(name.startswith("stem") for name in names)
    for _ in range(3):
        model.steps.add_(4)
        averages.update()
    with averages.swapped():
        assert model.steps == 9  # 4, then 6, then 9
    assert model.steps == 12
    model.blocks[0].requires_grad_(False)  # frozen later: its average stays
    averages.update()
    model.stem.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"stem\.weight was frozen or not there"):
        averages.update()


@distributed(2)
def test_a_state_dict_goes_through_a_checkpoint_to_another_mesh_and_to_one_process(
    tmp_path: Path,
) -> None:
    model = sharded(build())
    averages = ExponentialMovingAverage(model, 0.9)
    train(model, _sgd(model), range(2))
    averages.update()
    train(model, _sgd(model), range(1))
    averages.update()
    dcp.save({"averages": averages}, checkpoint_id=str(tmp_path))
    for other in (sharded(build(1), mesh=cpu_mesh((2, 1), ("outer", "inner"))), build(1)):
        loaded = ExponentialMovingAverage(other, 0.9)
        dcp.load({"averages": loaded}, checkpoint_id=str(tmp_path))
        assert loaded.updates == 2
        assert_same(_whole(loaded), _whole(averages))
        again = ExponentialMovingAverage(other, 0.9)
        again.load_state_dict(averages.state_dict())  # cut otherwise, in memory
        assert_same(_whole(again), _whole(averages))
    again = ExponentialMovingAverage(model, 0.9)
    again.load_state_dict({"averages": _whole(averages), "updates": 2})
    assert_same(_whole(again), _whole(averages))


@distributed(2)
def test_what_cannot_be_averaged_or_swapped_is_an_error_that_says_what_to_do() -> None:
    model = sharded(build())
    averages = ExponentialMovingAverage(model)
    with unsharded(model):
        for call in (averages.update, averages.swap_in):
            with pytest.raises(RuntimeError, match=r"inside unsharded\(\).*after the block"):
                call()
    handle = model.head.register_forward_pre_hook(lambda *args: averages.update())
    with pytest.raises(RuntimeError, match=r"in the middle of its forward or backward"):
        model(batch())
    handle.remove()
    with pytest.raises(RuntimeError, match=r"the model has its own values"):
        averages.swap_out()
    with averages.swapped():
        for call in (averages.update, averages.swap_in):
            with pytest.raises(RuntimeError, match=r"call swap_out\(\)"):
                call()
    state = averages.state_dict()
    with pytest.raises(ValueError, match=r"has no 'updates'"):
        averages.load_state_dict({"averages": state["averages"]})
    with pytest.raises(ValueError, match=r"shape \(2,\) for the average of head\.bias"):
        wrong = {**state["averages"], "head.bias": torch.ones(2)}
        averages.load_state_dict({"averages": wrong, "updates": 1})
    del state["averages"]["head.bias"]
    with pytest.raises(ValueError, match=r"only one of both has head\.bias"):
        averages.load_state_dict(state)
    plain = build()
    early = ExponentialMovingAverage(plain)
    sharded(plain)
    with pytest.raises(RuntimeError, match=r"make the averages after fully_shard"):
        early.update()
    assert everyone("in step") == ["in step"] * 2


def test_a_plain_model_is_averaged_as_torch_averages_it() -> None:
    plain = build()
    averages, torchs = ExponentialMovingAverage(plain, 0.9), Averaged(plain, 0.9)
    optimizer = _sgd(plain)
    for step in range(3):
        train(plain, optimizer, range(step, step + 1))
        averages.update()
        torchs.update(plain)
    assert_same(_whole(averages), torchs.values())
    with averages.swapped():
        assert_same(full_parameters(plain), torchs.values())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"decay": 1.5}, ValueError, r"decay is 1\.5; pass a number from 0 to 1"),
        ({"decay": "0.9"}, TypeError, r"decay is a str; pass a number"),
        ({"use_buffers": 1}, TypeError, r"use_buffers is 1"),
        ({"model": "net"}, TypeError, r"model is a str; pass an nn\.Module"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ExponentialMovingAverage(**{"model": nn.Linear(1, 1), **arguments})
