"""Offload policies: torch's fields and defaults, the identity, and the CPU as a home."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp

from fullshard.policies import CPUOffloadPolicy, OffloadPolicy


@pytest.mark.parametrize("name", ["OffloadPolicy", "CPUOffloadPolicy"])
def test_the_fields_their_order_and_their_defaults_are_torchs(name: str) -> None:
    ours: Any = {"OffloadPolicy": OffloadPolicy, "CPUOffloadPolicy": CPUOffloadPolicy}[name]
    theirs = getattr(torch_fsdp, name)
    fields = [
        [(field.name, field.default, field.kw_only) for field in dataclasses.fields(kind)]
        for kind in (ours, theirs)
    ]
    assert fields[0] == fields[1]
    assert ours() == ours()
    with pytest.raises(dataclasses.FrozenInstanceError):
        ours().anything = 1


def test_offload_to_the_cpu_is_an_offload_policy_as_in_torch() -> None:
    assert issubclass(torch_fsdp.CPUOffloadPolicy, torch_fsdp.OffloadPolicy)
    assert issubclass(CPUOffloadPolicy, OffloadPolicy)


@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_a_flag_that_is_no_bool_is_an_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^pin_memory is .*True or False"):
        CPUOffloadPolicy(pin_memory=wrong)


def test_home_is_the_cpu_whatever_computes() -> None:
    assert CPUOffloadPolicy().home(torch.device("cuda", 3)) == torch.device("cpu")
    assert OffloadPolicy().home(torch.device("cuda", 3)) == torch.device("cuda", 3)


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
    device = torch.device("cuda", torch.cuda.current_device())
    shard = torch.arange(4.0)
    pinned = CPUOffloadPolicy(pin_memory=True).store(shard)
    assert pinned.is_pinned()
    assert not CPUOffloadPolicy(pin_memory=False).store(shard).is_pinned()
    staged = CPUOffloadPolicy().stage_in(pinned, device)
    assert staged.device == device
    assert torch.equal(staged.cpu(), shard)
