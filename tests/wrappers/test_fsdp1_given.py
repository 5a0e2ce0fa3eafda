"""What libraries and users read of an instance, and wrap again, as they do with torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.wrappers.fsdp1 import BackwardPrefetch, MixedPrecision
from support.fsdp1_fronts import OURS, TORCH, Front, close, equal, full_state, rows, sgd, steps_of
from support.ranks import distributed
from support.surface.model import WIDTH, build

READ = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "sharding_strategy")


@distributed(2)
def test_attributes_are_those_of_torchs_and_cannot_be_set() -> None:
    for arguments in (
        {},
        {
            "backward_prefetch": "BACKWARD_POST",
            "forward_prefetch": True,
            "limit_all_gathers": False,
        },
        {"backward_prefetch": None, "sharding_strategy": "NO_SHARD"},
    ):
        ours, torchs = (front.wrapped(**arguments) for front in (OURS, TORCH))
        for name in READ:
            mine, other = getattr(ours, name), getattr(torchs, name)
            assert getattr(mine, "name", mine) == getattr(other, "name", other), name
        assert ours.cpu_offload.offload_params is torchs.cpu_offload.offload_params is False
        found = [each._has_params for each in OURS.module.fsdp_modules(ours)]
        assert found == [each._has_params for each in TORCH.module.fsdp_modules(torchs)]
    assert not OURS.module(OURS.wrapped(auto_wrap_policy=None))._has_params
    with pytest.raises(AttributeError):
        ours.backward_prefetch = BackwardPrefetch.BACKWARD_PRE


def _upcast_as_accelerate(front: Front, model: Any) -> list[str]:
    """Keeps trained parameters in float32, with the statements of Accelerate 1.15."""
    names = []
    for module in front.module.fsdp_modules(model):
        if not module._has_params:
            continue
        param = module._flat_param
        if param.dtype != torch.float32 and param.device != torch.device("meta"):
            assert param.requires_grad
            names += module._flat_param._fqns
            param.data = param.data.to(torch.float32)
            module._handle._orig_param_dtype = torch.float32
    return names


@distributed(2)
def test_what_came_in_bfloat16_is_trained_in_float32_as_accelerate_does_it() -> None:
    found = []
    for front in (OURS, TORCH):
        net = build().to(torch.bfloat16)
        model = front.wrapped(net, mixed_precision={"param_dtype": torch.bfloat16})
        names = _upcast_as_accelerate(front, model)
        assert _upcast_as_accelerate(front, model) == []
        optimizer = sgd(model)
        for step in range(2):
            optimizer.zero_grad()
            model(rows(step)).float().square().sum().backward()
            optimizer.step()
        state = full_state(front, model)
        assert {value.dtype for value in state.values()} == {torch.float32}
        found.append((names, state))
    assert found[0][0] == found[1][0]
    close(found[0][1], found[1][1])


@distributed(2)
def test_a_wrapped_module_can_be_wrapped_again_before_and_after_training() -> None:
    found = []
    for front in (OURS, TORCH):
        again = front.wrapped(front.wrapped(auto_wrap_policy=None), auto_wrap_policy=None)
        found.append((steps_of(front, again), full_state(front, again)))
    close(found[0], found[1])
    trained = OURS.wrapped(mixed_precision={"param_dtype": torch.bfloat16})
    steps_of(OURS, trained)
    with torch.no_grad():
        expected = trained(rows(0))
    again = OURS.module(trained, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    assert again.module is trained
    with torch.no_grad():
        assert torch.equal(again(rows(0)), expected)
    equal(full_state(OURS, again), full_state(OURS, trained))


@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@distributed(2)
def test_the_norm_and_the_clipped_gradients_are_in_the_gradients_dtype(
    dtype: torch.dtype, order: float
) -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(build().to(dtype), auto_wrap_policy=None)
        model(rows(0).to(dtype)).float().square().sum().backward()
        norm = model.clip_grad_norm_(0.05, order)
        with front.module.summon_full_params(model, with_grads=True):
            found.append((norm, [param.grad.clone() for param in model.parameters()]))
    assert found[0][0].dtype is dtype
    equal(found[0], found[1])


def _ranks_of_experts() -> tuple[Any, list[nn.Module]]:
    torch.manual_seed(0)
    shared = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    experts: list[nn.Module] = [nn.Identity() for _ in range(1 + dist.get_rank())]
    experts.append(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*experts, *shared), experts


@pytest.mark.parametrize("nested", [False, True])
@distributed(2)
def test_ranks_may_ignore_different_numbers_of_modules(nested: bool) -> None:
    found = []
    for front in (OURS, TORCH):
        net, experts = _ranks_of_experts()
        if nested:
            for index in range(len(experts), len(net)):
                net[index] = front.wrapped(net[index], auto_wrap_policy=None)
        model = front.wrapped(net, auto_wrap_policy=None, ignored_modules=experts)
        optimizer = torch.optim.SGD([*model.parameters()][2:], lr=0.1)
        model(rows(0)).square().sum().backward()
        optimizer.step()
        with front.module.summon_full_params(model):
            found.append([param.detach().clone() for param in model.parameters()])
    close(found[0], found[1])


@distributed(2)
def test_an_instance_inside_an_ignored_module_stays_one() -> None:
    found = []
    for front in (OURS, TORCH):
        net = build()
        inner: Any = net.blocks[1]
        inner.fc1 = front.wrapped(inner.fc1, auto_wrap_policy=None)
        head = list(net.head.parameters())
        model = front.wrapped(net, auto_wrap_policy=None, ignored_modules=[inner, net.head])
        assert model.blocks[1] is inner
        assert all(a is b for a, b in zip(head, model.head.parameters(), strict=True))
        model(rows(0)).square().sum().backward()
        with front.module.summon_full_params(model, with_grads=True):
            found.append({name: p.grad.clone() for name, p in inner.fc1.named_parameters()})
    close(list(found[0].values()), list(found[1].values()))


@distributed(2)
def test_the_size_based_policy_has_its_defaults_as_attributes() -> None:
    found = []
    for front in (OURS, TORCH):
        policy = front.wrap.size_based_auto_wrap_policy
        leaves, kept = policy.FORCE_LEAF_MODULES, policy.EXCLUDE_WRAP_MODULES
        policy.EXCLUDE_WRAP_MODULES = {nn.Linear}
        try:
            said = [policy(nn.Linear(2, 2), False, 9, min_num_params=4), leaves, kept]
        finally:
            policy.EXCLUDE_WRAP_MODULES = kept
        found.append([*said, policy(nn.Linear(2, 2), False, 9, min_num_params=4)])
    assert found[0] == found[1]


def _move_as_verl(front: Front, model: Any) -> None:
    """Moves all shards to the CPU, where they are, by the handles, as verl does between steps."""
    for module in front.module.fsdp_modules(model):
        if module._has_params:
            handle = module._handle
            before = handle.flat_param
            assert before.data.size() == before._local_shard.size()
            assert before.data.data_ptr() == before._local_shard.data_ptr()
            handle.flat_param_to(torch.device("cpu"), non_blocking=True)
            before._local_shard = before.data


@pytest.mark.parametrize("use_orig_params", [False, True])
@distributed(2)
def test_shards_are_moved_between_steps_by_the_handles_as_verl_does_it(
    use_orig_params: bool,
) -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(use_orig_params=use_orig_params)
        optimizer = sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            model(rows(step)).square().sum().backward()
            optimizer.step()
            _move_as_verl(front, model)
        found.append(full_state(front, model))
    close(*found)
