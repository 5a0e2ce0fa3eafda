"""The host never waits for the device in a step, but where it must know who used a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import FSDPModule, fully_shard
from support.modules import Assembled
from support.wide.fake import fake_world
from support.wide.gpu import CARD, card, card_world, synchronisations, without_synchronisation
from support.wide.model import LEARNING_RATE, loss_of, make_batch, make_stack, shard

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["1 rank", "fake, 8 ranks"])
def mesh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeviceMesh]:
    card.init()
    card.set_device(CARD)
    if request.param == "1 rank":
        with card_world(tmp_path_factory.mktemp("world")) as mesh:
            yield mesh
    else:
        with fake_world(8, CARD.type) as mesh:
            yield mesh


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_step_never_makes_the_host_wait(
    mesh: DeviceMesh, reshard: bool | None, dtype: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": reshard}
    model = shard(make_stack().to(CARD), **options)
    blocks: list[FSDPModule] = [block for block in model.blocks if isinstance(block, FSDPModule)]
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    batch = make_batch(8, 0).to(CARD)

    def step() -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # plans, and lets ranks agree
    step()
    with without_synchronisation():
        for _ in range(3):
            step()
    card.synchronize()


def _branches() -> Any:
    return Assembled(lambda m, x: m.used(x), used=nn.Linear(5, 3), unused=nn.Linear(5, 3))


def test_a_rank_that_lacks_a_gradient_waits_once_at_the_end_of_backward(mesh: DeviceMesh) -> None:
    model = nn.Sequential(_branches(), nn.Linear(3, 5), _branches()).to(CARD)
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = torch.ones(4, 5, device=CARD)
    model(batch).sum().backward()  # plans
    model.zero_grad()
    card.synchronize()
    with synchronisations() as waits:
        loss = model(batch).sum()
    assert waits == []
    with synchronisations() as waits:
        loss.backward()
    assert len(waits) == 1


def test_the_watch_notices_a_host_that_waits() -> None:
    card.set_device(CARD)
    value = torch.ones((), device=CARD)
    with pytest.raises(RuntimeError, match="synchronizing"), without_synchronisation():
        value.item()
    with synchronisations() as waits:
        value.item()
    assert len(waits) == 1
