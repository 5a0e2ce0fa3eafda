"""A bit of a gradient that changes after the reduction is found; lawful changes are no damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fullshard.comm.spi import LISTENERS
from fullshard.insight import DamagedNumbersError, IntegrityChecks, IntegrityPolicy
from fullshard.insight.integrity.checksums import checksum, is_one_bit
from fullshard.optim import clip_grad_norm_
from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from fullshard.sharding.spi import local_of
from support.ranks import cpu_mesh, distributed

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def _flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    words = tensor.detach().view(-1).view(WORDS[tensor.dtype])
    bits = words.element_size() * 8
    words[place] ^= -(2 ** (bits - 1)) if bit == bits - 1 else 1 << bit


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=st.lists(st.floats(width=16), min_size=1, max_size=40),
    dtype=st.sampled_from(list(WORDS)),
    data=st.data(),
)
def test_checksums_show_that_one_bit_of_one_element_changed(
    values: list[float], dtype: torch.dtype, data: Any
) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    before, bits = checksum(tensor), tensor.element_size() * 8
    place = data.draw(st.integers(0, len(values) - 1))
    _flip(tensor, place, data.draw(st.integers(0, bits - 1)))
    now = checksum(tensor)
    assert is_one_bit(before, now, len(values))
    assert not is_one_bit(before, before, len(values))
    assert not is_one_bit(before, now, place)  # a tensor that ends before it


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0**-16, 0.3])
def test_a_scaled_tensor_is_not_one_changed_bit(factor: float, dtype: torch.dtype) -> None:
    for numel in range(2, 65):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
        assert not is_one_bit(checksum(values), checksum(values * factor), numel)


def _made(**options: Any) -> tuple[Any, torch.optim.Optimizer, IntegrityChecks]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    for module in (model[0], model):
        fully_shard(module, mesh=cpu_mesh(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, IntegrityChecks(model, optimizer, IntegrityPolicy(every=1))


def _backward(model: Any) -> None:
    model(torch.full((3, 4), 1.0 + dist.get_rank())).square().mean().backward()


def _gradient(model: nn.Module, name: str) -> torch.Tensor:
    gradient = dict(model.named_parameters())[name].grad
    assert gradient is not None
    return local_of(gradient)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "on the CPU": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("options", OPTIONS)
@distributed(2)
def test_a_flipped_bit_after_the_reduction_is_named(options: str) -> None:
    model, _, checks = _made(**OPTIONS[options])
    for number, name in enumerate(["0.weight", "2.bias", "2.weight", "0.bias"]):
        for when in ("before the update", "between micro-batches", "before twice"):
            model.zero_grad()
            checks.begin()
            _backward(model)
            if dist.get_rank() == 1:
                _flip(_gradient(model, name), 0, 9 * number)
            if when == "between micro-batches":
                _backward(model)
            elif when == "before twice":
                checks.twice(lambda: _backward(model))
            with pytest.raises(DamagedNumbersError) as raised:
                checks.before_update()
            (finding,) = raised.value.findings
            found = finding.stage, finding.ranks, finding.tensor
            assert found == ("reduced gradient", (1,), name)
    assert not LISTENERS


def _unscale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def _negate_locally(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for name, _param in model.named_parameters():
        _gradient(model, name).data.neg_()


LAWFUL: dict[str, Callable[[Any, torch.optim.Optimizer], object]] = {
    "ours": lambda model, _: clip_grad_norm_(model, 1e-3),
    "torch's": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "by value": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
    "unscaled": _unscale,
    "by data": _negate_locally,
    "zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "none": lambda _, optimizer: optimizer.zero_grad(),
}


@pytest.mark.parametrize("change", LAWFUL)
@distributed(2)
def test_a_change_by_the_program_is_no_damage(change: str) -> None:
    """Before the update, and between micro-batches; a call before the change compares gradients."""
    model, optimizer, checks = _made()
    for struck in (False, True):
        for micro_batches in (1, 2):
            checks.begin()
            for _ in range(micro_batches):
                _backward(model)
                if struck and dist.get_rank() == 1:
                    _flip(_gradient(model, "0.bias"), 1, 3)
                if struck:
                    with pytest.raises(DamagedNumbersError, match=r"gradient of 0\.bias, rank 1"):
                        checks.before_update()
                    break
                LAWFUL[change](model, optimizer)
            checks.before_update(norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            checks.end()


@distributed(2)
def test_a_hook_that_changes_gradients_is_no_damage() -> None:
    model, _, checks = _made()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    for _ in range(3):
        checks.begin()
        _backward(model)
        _backward(model)
        checks.before_update()
    assert not LISTENERS


@distributed(2)
def test_gradients_are_not_compared_in_steps_that_are_not_due() -> None:
    model, optimizer, _ = _made()
    for policy in (IntegrityPolicy(every=2), IntegrityPolicy(every=1, at_rest=False)):
        checks = IntegrityChecks(model, optimizer, policy)
        checks.begin()
        assert not LISTENERS
        _backward(model)
        _flip(_gradient(model, "2.bias"), 0, 3)
        checks.before_update()
