"""Offload policies: torch's fields and defaults, the identity, and the CPU as a home."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp

from fullshard.policies import CPUOffloadPolicy, OffloadPolicy
from support import card

CARD, CPU = torch.device("cuda", 3), torch.device("cpu")
FLAGS = ("parameters", "optimizer_state")


@pytest.mark.parametrize("name", ["OffloadPolicy", "CPUOffloadPolicy"])
def test_the_fields_their_order_and_their_defaults_are_torchs_and_ours_are_keywords(
    name: str,
) -> None:
    ours: Any = {"OffloadPolicy": OffloadPolicy, "CPUOffloadPolicy": CPUOffloadPolicy}[name]
    theirs = getattr(torch_fsdp, name)
    fields = [
        [(field.name, field.default, field.kw_only) for field in dataclasses.fields(kind)]
        for kind in (ours, theirs)
    ]
    added = [(flag, True, True) for flag in FLAGS] if ours is CPUOffloadPolicy else []
    assert fields[0] == [*fields[1], *added]
    assert ours() == ours()
    with pytest.raises(dataclasses.FrozenInstanceError):
        ours().anything = 1


def test_offload_to_the_cpu_is_an_offload_policy_as_in_torch() -> None:
    assert issubclass(torch_fsdp.CPUOffloadPolicy, torch_fsdp.OffloadPolicy)
    assert issubclass(CPUOffloadPolicy, OffloadPolicy)


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
@pytest.mark.parametrize("flag", ["pin_memory", *FLAGS])
def test_a_flag_that_is_no_bool_is_an_error(flag: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"^{flag} is .*True or False"):
        CPUOffloadPolicy(**{flag: wrong})


@pytest.mark.parametrize("state", [True, False])
def test_home_is_where_parameters_are_wherever_the_state_is(state: bool) -> None:
    for parameters, home in ((True, CPU), (False, CARD)):
        policy = CPUOffloadPolicy(parameters=parameters, optimizer_state=state)
        assert policy.home(CARD) == home
    assert OffloadPolicy().home(CARD) == CARD


@pytest.mark.parametrize("flag", FLAGS)
def test_a_step_elsewhere_needs_a_package_that_does_it(flag: str) -> None:
    with patch("fullshard.policies.elsewhere.STEP_EXTENSIONS", []):
        CPUOffloadPolicy()
        with pytest.raises(ImportError, match=r"two flags needs .*pip install fullshard-optim"):
            CPUOffloadPolicy(**{flag: False})


def test_a_step_is_where_the_state_is() -> None:
    """The meta device stands for the one that computes."""
    device, tensor = torch.device("meta"), torch.ones(2)
    for parameters in (True, False):
        here = CPUOffloadPolicy(parameters=parameters, optimizer_state=True)
        there = CPUOffloadPolicy(parameters=parameters, optimizer_state=False)
        assert here.stage_step(tensor, device) is tensor
        assert there.stage_step(tensor, device).device == device
        assert there.stage_step(tensor.to(device), device).device == device
    assert OffloadPolicy().stage_step(tensor, device) is tensor


def test_the_gradient_comes_back_to_the_cpu() -> None:
    gradient = torch.ones(2)
    assert torch.equal(CPUOffloadPolicy().stage_out(gradient), gradient)
    assert CPUOffloadPolicy().stage_out(gradient).device.type == "cpu"


def test_without_an_accelerator_nothing_is_pinned() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator, so memory is pinned")
    shard = torch.ones(2)
    assert CPUOffloadPolicy(pin_memory=True).store(shard) is shard


@pytest.mark.gpu
def test_a_shard_is_pinned_if_asked_for_and_staged_onto_the_device() -> None:
    shard = torch.arange(4.0)
    pinned = CPUOffloadPolicy(pin_memory=True).store(shard)
    assert pinned.is_pinned()
    assert not CPUOffloadPolicy(pin_memory=False).store(shard).is_pinned()
    staged = CPUOffloadPolicy().stage_in(pinned, card.CARD)
    assert staged.device == card.CARD
    assert torch.equal(staged.cpu(), shard)
