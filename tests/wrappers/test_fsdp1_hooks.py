"""Communication hooks: the default one and the compressing ones, against torch's, and own ones."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks as torch_hooks

from fullshard.wire import sum_widened
from fullshard.wrappers import comm_hooks
from support.fsdp1_fronts import (
    OURS,
    TORCH,
    Front,
    close,
    equal,
    full_state,
    hybrid_mesh,
    loss_of,
    quiet,
    rows,
    steps_of,
    up_to_order,
)
from support.products import few
from support.ranks import distributed, world

HALF = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


def _hooked(front: Front, hooks: Any, name: str, strategy: str) -> Any:
    model = front.wrapped(sharding_strategy=strategy)
    kind = hooks.LowPrecisionState if name in HALF else hooks.DefaultState
    model.register_comm_hook(kind(model.process_group), getattr(hooks, name))
    return model


@pytest.mark.parametrize(
    "strategy", few(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"], "FULL_SHARD", "NO_SHARD")
)
@distributed(2, 4, matrix=[4])
def test_the_default_hook_changes_nothing(strategy: str) -> None:
    name = "allreduce_hook" if strategy == "NO_SHARD" else "reduce_scatter_hook"
    expected = steps_of(OURS, OURS.wrapped(sharding_strategy=strategy))
    equal(steps_of(OURS, _hooked(OURS, comm_hooks, name, strategy)), expected)
    up_to_order(expected, steps_of(TORCH, _hooked(TORCH, torch_hooks, name, strategy)))
    up_to_order(steps_of(OURS, _hooked(OURS, torch_hooks, name, strategy)), expected)


@pytest.mark.cross
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("name", sorted(HALF))
@distributed(2, 4, matrix=[4])
def test_a_compressing_hook_sends_half_as_much_and_is_right_to_its_precision(
    name: str, strategy: str
) -> None:
    sent: list[torch.dtype] = []
    all_reduce = dist.all_reduce

    def noted_sum(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        sent.append(tensor.dtype)
        sum_widened(output, tensor, group)
        parts = [torch.empty_like(tensor, dtype=torch.float32) for _ in range(group.size())]
        dist.all_gather(parts, tensor.float(), group=group)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert torch.equal(output, total.chunk(group.size())[group.rank()]), "added in fp32"

    def reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.append(tensor.dtype)
        return all_reduce(tensor, *args, **options)

    model = _hooked(OURS, comm_hooks, name, strategy)
    net = OURS.wrapped(sharding_strategy=strategy)
    loss_of(net(rows(0))).backward()
    with (
        patch.object(comm_hooks, "sum_widened", noted_sum),
        patch.object(dist, "all_reduce", reduce),
    ):
        loss_of(model(rows(0))).backward()
    assert sent == [HALF[name]] * 3
    for one, other in zip(model.parameters(), net.parameters(), strict=True):
        got, exact = one.grad.full_tensor(), other.grad.full_tensor()
        assert got.dtype is torch.float32
        spread = torch.finfo(HALF[name]).eps * (exact.abs().max() + 1)
        torch.testing.assert_close(got, exact, rtol=0, atol=4 * float(spread))
        assert not torch.equal(got, exact) or not exact.any()


@pytest.mark.cross
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("name", sorted(HALF))
@distributed(2, 4, matrix=[4])
def test_a_compressing_hook_gives_the_gradients_that_torchs_gives(name: str, strategy: str) -> None:
    found = []
    for front, hooks in ((OURS, comm_hooks), (TORCH, torch_hooks)):
        model = _hooked(front, hooks, name, strategy)
        with patch.object(torch.Tensor, "record_stream"):  # of torch's hooks, for lack of a stream
            loss_of(model(rows(0))).backward()
        with quiet(), front.module.summon_full_params(model, with_grads=True):
            found.append({n: param.grad.clone() for n, param in model.named_parameters()})
    if strategy == "NO_SHARD":
        up_to_order(found[0], found[1], HALF[name])
        return
    ours, theirs = found  # torch adds in the half type what ours adds in fp32
    largest = max(gradient.abs().max().item() for gradient in theirs.values())
    off = dist.get_world_size() * torch.finfo(HALF[name]).eps * largest
    for key, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[key], rtol=0, atol=off)


class Sign:
    """State of a hook of the user's: it counts, and keeps what it left out."""

    def __init__(self) -> None:
        self.calls = 0


def _own_hook(state: Sign, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Twice the mean, by a sum of its own: replaces ``data``, as torch's hooks do."""
    state.calls += 1
    world = dist.get_world_size()
    if output is None:
        grad.data = grad.data.double()
        dist.all_reduce(grad)
        grad.data = (grad.data * 2 / world).float()
        return
    whole = grad.double()
    part = torch.empty(output.shape, dtype=torch.float64)
    with quiet():  # torch 2.13 has another name for it
        dist.reduce_scatter_tensor(part, whole)
    output.data = part * 2 / world


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@distributed(2, 4, matrix=[4])
def test_an_own_hook_reduces_all_below_with_its_state(strategy: str) -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(sharding_strategy=strategy)
        state = Sign()
        model.register_comm_hook(state, _own_hook)
        result = steps_of(front, model)
        found.append(result)
        assert state.calls == 3 * 3  # groups, steps
    close(found[0], found[1])
    plain = OURS.wrapped(sharding_strategy=strategy)
    loss_of(plain(rows(0))).backward()
    hooked = OURS.wrapped(sharding_strategy=strategy)
    hooked.register_comm_hook(Sign(), _own_hook)
    with hooked.no_sync():
        loss_of(hooked(rows(0))).backward()
    loss_of(hooked(rows(0))).backward()
    for one, other in zip(hooked.parameters(), plain.parameters(), strict=True):
        close(one.grad.full_tensor(), 4 * other.grad.full_tensor())


@distributed(2, 4, matrix=[4])
def test_a_hook_that_sends_nothing_leaves_each_rank_its_own_gradient() -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(sharding_strategy="NO_SHARD")
        model.register_comm_hook(None, lambda state, grad: None)
        loss_of(model(rows(0))).backward()
        grads = [param.grad for param in model.parameters()]
        found.append([g.to_local() if front is OURS else g for g in grads])
    close(found[0], found[1])


@distributed(2, 4, matrix=[4])
def test_parameters_without_a_gradient_stay_so_under_a_hook() -> None:
    model = _hooked(OURS, comm_hooks, "reduce_scatter_hook", "FULL_SHARD")
    out = model.blocks[0](rows(0))
    loss_of(out).backward()
    grads = {name: param.grad is None for name, param in model.named_parameters()}
    assert all(none is not name.startswith("blocks.0.") for name, none in grads.items())


@distributed(2, 4, matrix=[4])
def test_a_hook_is_registered_on_the_root_once_and_can_be_called() -> None:
    model = OURS.wrapped()
    with pytest.raises(TypeError, match="hook is a int"):
        model.register_comm_hook(None, 3)
    model.check_is_root()
    with pytest.raises(RuntimeError, match="on the root"):
        model.blocks[0].register_comm_hook(None, print)
    model.register_comm_hook(None, print)
    with pytest.raises(RuntimeError, match="registered before"):
        model.register_comm_hook(None, print)
    with pytest.raises(ValueError, match="process_group is None"):
        comm_hooks.DefaultState(None)  # type: ignore[arg-type]
    assert full_state(OURS, model)


@distributed(2, 4)
def test_a_hybrid_strategy_takes_no_hook() -> None:
    mesh = hybrid_mesh()
    model = OURS.wrapped(sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    with pytest.raises(ValueError, match="HYBRID_SHARD reduces in two ways"):
        model.register_comm_hook(None, print)


@distributed(2, 4)
def test_a_states_factors_are_torchs() -> None:
    for ours, theirs in (
        (comm_hooks.DefaultState, torch_hooks.DefaultState),
        (comm_hooks.LowPrecisionState, torch_hooks.LowPrecisionState),
    ):
        group = world()
        mine, its = ours(group), theirs(group)
        for name in ("world_size", "gradient_predivide_factor", "gradient_postdivide_factor"):
            assert getattr(mine, name) == getattr(its, name)
