"""A step is one step to torch: hooks, profiles, schedulers and scalers see it once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fullshard.optim import SOAP, AdamW8bit, Muon
from fullshard.sharding import fully_shard
from support.ranks import cpu_mesh, distributed

Maker = Callable[[nn.Module], torch.optim.Optimizer]


class _OfAUser(Muon):
    """A subclass, whose step is inherited twice."""


MAKERS = [
    lambda model: Muon(model.parameters()),
    lambda model: SOAP(model.parameters()),
    lambda model: AdamW8bit(model.parameters()),
    lambda model: _OfAUser(model.parameters()),
]
NAMES = ["Muon", "SOAP", "AdamW8bit", "_OfAUser"]


def _sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=cpu_mesh())
    model(torch.ones(2, 4)).sum().backward()
    return model


@pytest.mark.parametrize(("make", "name"), list(zip(MAKERS, NAMES, strict=True)), ids=NAMES)
@distributed(1, 2)
def test_hooks_profiles_schedulers_and_scalers_see_one_step(make: Maker, name: str) -> None:
    model = _sharded()
    optimizer = make(model)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *given: seen.append("before"))
    optimizer.register_step_post_hook(lambda *given: seen.append("after"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        scaler.step(optimizer)
    scaler.update()
    schedule.step()
    assert seen == ["before", "after"]
    steps = [each for each in found.events() if each.name.startswith("Optimizer.step#")]
    assert [each.name for each in steps] == [f"Optimizer.step#{name}.step"]
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["initial_lr"] * 0.1]
