"""What a plan's choices do to a model, and the running sum that makes plans fast."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.insight import statistics
from fullshard.policies import DepthPrefetch, MixedPrecisionPolicy, NoPrefetch
from fullshard.preflight import Choice, split_batch
from fullshard.preflight.planning.choices import blocks_of
from fullshard.preflight.planning.memory.storages import Storages
from fullshard.sharding import FSDPModule
from support.modules import Stack
from support.ranks import cpu_mesh, distributed


def test_the_running_sum_is_that_of_all_storages_alive() -> None:
    drawn, storages = random.Random(0), Storages()
    alive: list[torch.Tensor] = [torch.empty(7)]
    storages.number(alive[0])
    alive[0].untyped_storage().resize_(0)  # before anybody follows
    with storages.followed():
        for _ in range(300):
            what = drawn.randrange(4)
            if what == 0 or not alive:
                alive.append(torch.empty(drawn.randrange(100)))
                storages.number(alive[-1])
            elif what == 1:
                alive.pop(drawn.randrange(len(alive)))
            elif what == 2:
                drawn.choice(alive).untyped_storage().resize_(drawn.randrange(400))
            else:
                storages.number(drawn.choice(alive).view(torch.uint8))
            expected = [each.untyped_storage().nbytes() for each in alive]
            assert storages.nbytes() == sum(expected)
            assert sorted(storages.sizes().values()) == sorted(expected)
    alive.clear()
    assert storages.nbytes() == 0


def five_blocks() -> Stack:
    stem = nn.Linear(4, 4)
    return Stack((nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)), stem=stem)


def test_options_are_what_fully_shard_takes() -> None:
    assert Choice().options == {}
    assert str(Choice()) == "defaults"
    choice = Choice(reshard=False, prefetch=2, dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert choice.options == {
        "reshard_after_forward": False,
        "prefetch_policy": DepthPrefetch(forward=2, backward=2),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    assert str(choice) == "bfloat16, keep gathered, prefetch 2"
    assert Choice(prefetch=0).options == {"prefetch_policy": NoPrefetch()}
    assert str(Choice(reshard=4, group=2, recompute=True)) == "reshard to 4, groups of 2, recompute"


@distributed(2)
def test_a_choice_groups_neighbouring_units_and_computes_them_again() -> None:
    torch.manual_seed(0)
    model, plain = five_blocks(), five_blocks()
    plain.load_state_dict(model.state_dict())
    Choice(group=2, recompute=True).shard(blocks_of, model, cpu_mesh((2,), ("shard",)))
    assert isinstance(model, FSDPModule)
    assert len(statistics(model).groups) == 4  # of 2, 2 and 1 blocks, and the root
    x = torch.randn(3, 4)
    model(x).sum().backward()
    plain(x).sum().backward()
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)  # type: ignore[union-attr]


def test_a_batch_is_split_along_its_rows() -> None:
    batch = [torch.arange(8).view(4, 2), {"target": torch.arange(4)}, "name"]
    part = split_batch(batch, 2)
    assert part[0].tolist() == [[0, 1], [2, 3]]
    assert part[1]["target"].tolist() == [0, 1]
    assert part[2] == "name"
    with pytest.raises(ValueError, match=r"3 micro-batches do not divide .*\(4, 2\)"):
        split_batch(batch, 3)


@pytest.mark.parametrize("wrong", [{"prefetch": -1}, {"group": 0}, {"micro_batches": 0}], ids=str)
def test_a_number_that_is_too_small_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        Choice(**wrong)
