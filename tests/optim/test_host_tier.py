"""Optimizer state in host memory, stepped on the device: ordered copies, and equal steps."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fullshard.optim import HostTier, OffloadedOptimizer, StateOffloadError
from fullshard.optim.tiers.host_memory import HostMemory
from fullshard.policies import CPUOffloadPolicy
from support.card import CARD, card
from support.device.pace import Pace, paced
from support.optim.offloaded import adamw, assert_equal_runs, assert_on_host, on_host
from support.ranks import distributed
from support.surface.model import batch, build, sharded, train
from support.surface.ranks import everyone

STEPS = 3


@pytest.mark.device(paces=True)
@distributed(2)
def test_parameters_on_the_host_are_stepped_on_the_device_with_state_from_the_host() -> None:
    policy = CPUOffloadPolicy(optimizer_state=False)
    mine, theirs = (sharded(build(), offload_policy=policy) for _ in range(2))
    one, other = on_host(adamw(mine)), adamw(theirs)
    train(mine, one, range(STEPS))
    train(theirs, other, range(STEPS))
    assert_equal_runs(mine, one, theirs, other)
    assert_on_host(one)


@pytest.mark.device(paces=True)
@distributed(2)
def test_a_state_dict_goes_there_and_back() -> None:
    whole = sharded(build())
    expected = adamw(whole)
    train(whole, expected, range(4))
    model = sharded(build())
    plain = adamw(model)
    train(model, plain, range(1))
    offloaded = on_host(adamw(model))
    offloaded.load_state_dict(plain.state_dict())
    train(model, offloaded, range(1, 2))
    again = on_host(adamw(model))
    set_optimizer_state_dict(model, again, get_optimizer_state_dict(model, offloaded))
    train(model, again, range(2, 3))
    plain.load_state_dict(again.state_dict())
    train(model, plain, range(3, 4))
    assert_equal_runs(model, plain, whole, expected)


@distributed(2)
def test_a_host_without_memory_is_an_error_on_all_ranks_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(self: HostMemory, nbytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    def takes(self: HostMemory, tensor: torch.Tensor) -> bool:
        self.device = self.device or tensor.device
        return True

    mine, theirs = sharded(build()), sharded(build())
    one, other = on_host(adamw(mine)), adamw(theirs)
    train(theirs, other, range(2))
    for step in range(2):
        mine(batch(step)).square().mean().backward()
        with monkeypatch.context() as patched:
            if dist.get_rank() == 1:
                patched.setattr(HostMemory, "_add_slab", full)
                patched.setattr(HostMemory, "takes", takes)  # as if on a device
            with pytest.raises(StateOffloadError) as raised:
                one.step()
        one.zero_grad()
        found = everyone([str(raised.value)])
        assert found == [found[0]] * 2
        assert re.search("rank 1: no space for .* stays on the device", found[0][0])
    assert_equal_runs(mine, one, theirs, other)


def test_memory_is_used_again_and_runs_stay_in_a_slab() -> None:
    memory = HostMemory(slab_bytes=3 * 4096)
    extents = [memory.reserve(nbytes) for nbytes in (1, 5000, 4097, 20000)]
    assert [extent.nbytes for extent in extents] == [4096, 8192, 8192, 20480]
    memory.give_back(extents[1])
    assert memory.reserve(4097) == extents[1]
    sent = torch.randint(0, 256, (sum(extent.nbytes for extent in extents),), dtype=torch.uint8)
    memory.write(extents, sent)
    back = torch.zeros_like(sent)
    memory.read(extents, back)
    assert torch.equal(back, sent)
    for extent, expected in zip(extents, sent.split([e.nbytes for e in extents]), strict=True):
        assert torch.equal(memory.view(extent.offset, extent.nbytes), expected)


@pytest.mark.parametrize("options", [{"buffers": 2}, {"bucket_mb": 0}, {"min_bytes": 0}])
def test_wrong_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is "):
        HostTier(**options)


# -- on a device ----------------------------------------------------------------------------------


def _on_card() -> tuple[nn.Module, OffloadedOptimizer]:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)]).to(CARD)
    optimizer = OffloadedOptimizer(adamw(model), HostTier(bucket_mb=0.005, min_bytes=1))
    return model, optimizer


@pytest.mark.device
def test_the_host_waits_for_no_copy_of_a_step() -> None:
    model, optimizer = _on_card()
    inputs = torch.ones(4, 32, device=CARD)
    for step in range(3):
        model(inputs).square().mean().backward()
        card._sleep(1)  # nothing that is queued runs until the host or a stream waits
        card.set_sync_debug_mode("error" if step else "default")  # the first step makes the state
        try:
            optimizer.step()
        finally:
            card.set_sync_debug_mode("default")
        optimizer.zero_grad()
    assert optimizer.statistics.bytes_read > 0


@pytest.mark.device
def test_the_device_holds_the_state_of_three_buckets_and_none_between_steps() -> None:
    model, optimizer = _on_card()
    inputs = torch.ones(4, 32, device=CARD)
    peaks = []
    for _ in range(3):
        model(inputs).square().mean().backward()
        card.synchronize()
        before = card.memory_allocated()
        card.reset_peak_memory_stats()
        optimizer.step()
        optimizer.state  # noqa: B018 # waits for the copies
        peaks.append(card.max_memory_allocated() - before)
        assert card.memory_allocated() == before
        optimizer.zero_grad()
    state = sum(v.nbytes for each in optimizer.state.values() for v in each.values())
    bucket = 3 * 4096  # two averages of a weight, and of a bias, each rounded up
    assert state > 6 * 2 * 4096
    assert peaks[1] <= 3 * 2 * bucket < 2 * state


@pytest.mark.device
def test_what_is_allocated_after_a_step_leaves_its_copies_alone() -> None:
    """The buffers of a step are freed while copies from them are on their way."""
    with paced(Pace(held=1.0)):
        (model, optimizer), plain = (
            _on_card(),
            nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)]),
        )
        plain.to(CARD).load_state_dict(model.state_dict())
        other = adamw(plain)
        inputs = torch.ones(4, 32, device=CARD)
        for _ in range(3):
            for each, stepped in ((model, optimizer), (plain, other)):
                stepped.zero_grad()
                each(inputs).square().mean().backward()
            optimizer.step()
            taken = [torch.full((n * 4096,), 255, dtype=torch.uint8, device=CARD) for n in range(9)]
            states = [dict(each) for each in optimizer.state.values()]  # waits for the copies
            found = [value.clone() for state in states for value in state.values()]
            other.step()
            expected = [value for state in other.state.values() for value in state.values()]
            assert all(torch.equal(a, b.cpu()) for a, b in zip(found, expected, strict=True))
            del taken
