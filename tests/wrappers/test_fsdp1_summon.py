"""``summon_full_params``: full parameters and gradients for a block, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from support.fsdp1_fronts import (
    OURS,
    TORCH,
    Front,
    close,
    equal,
    full_state,
    gradients,
    loss_of,
    mean_gradients,
    quiet,
    rows,
    up_to_order,
)
from support.products import few
from support.ranks import distributed
from support.surface.model import build

BF16 = {"param_dtype": torch.bfloat16}


@pytest.mark.cross
@pytest.mark.parametrize("precision", [{}, BF16], ids=["full", "bf16"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("writeback", [True, False])
@distributed(2, 4, matrix=[4])
def test_values_are_whole_and_exact_and_changes_stay_where_asked(
    writeback: bool, offload: bool, precision: Any
) -> None:
    found = []
    for front in (OURS, OURS if offload else TORCH):  # torch's own offload ends the process
        model = front.wrapped(mixed_precision=precision)
        with (
            quiet(),
            front.module.summon_full_params(model, writeback=writeback, offload_to_cpu=offload),
        ):
            inside = {n: p.detach().clone() for n, p in model.named_parameters()}
            assert not any(isinstance(param, DTensor) for param in model.parameters())
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1 / 3)
        found.append((inside, full_state(front, model)))
    equal(found[0], found[1])
    expected = {n: p.detach() for n, p in build().named_parameters()}
    equal(found[0][0], expected)
    if writeback:
        expected = {name: value + 1 / 3 for name, value in expected.items()}
    equal(found[0][1], expected)
    assert all(isinstance(param, DTensor) for param in model.parameters()) is (front is OURS)


@pytest.mark.parametrize("precision", [{}, BF16], ids=["full", "bf16"])
@distributed(2, 4, matrix=[4])
def test_the_first_rank_alone_may_have_them_and_its_changes_go_to_all(precision: Any) -> None:
    for offload in (True, False):
        model = OURS.wrapped(mixed_precision=precision)
        with OURS.module.summon_full_params(model, rank0_only=True, offload_to_cpu=offload):
            first = dist.get_rank() == 0
            assert isinstance(model.stem.weight, DTensor) is not first
            with torch.no_grad():
                for param in model.parameters() if first else ():
                    param.mul_(2)
        expected = {name: 2 * param.detach() for name, param in build().named_parameters()}
        equal(full_state(OURS, model), expected)


def _shapes(front: Front, model: Any, module: Any, **arguments: Any) -> dict[str, Any]:
    whole = {name: param.shape for name, param in build().named_parameters()}
    with quiet(), front.module.summon_full_params(module, **arguments):
        return {
            name: param.shape == whole[name] and not isinstance(param, DTensor)
            for name, param in (
                (name.replace("_fsdp_wrapped_module.", ""), param)
                for name, param in model.named_parameters()
            )
            if param.ndim == 2 or name.endswith("weight")  # a whole one of torch's is 2-D
        }


@distributed(2, 4, matrix=[4])
def test_without_recursion_only_the_instances_own_are_whole() -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped()
        found.append(
            [
                _shapes(front, model, model, recurse=False),
                _shapes(front, model, model.blocks[0], recurse=False),
                _shapes(front, model, model.blocks[0]),
                _shapes(front, model, nn.Sequential(model)),
                _shapes(front, model, nn.Sequential(model), recurse=False),
            ]
        )
    assert found[0] == found[1]


@pytest.mark.cross
@pytest.mark.parametrize(
    "strategy", few(["FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP"], "FULL_SHARD", "NO_SHARD")
)
@pytest.mark.parametrize("writeback", [True, False])
@distributed(2, 4, matrix=[4])
def test_gradients_are_whole_and_written_back_with_the_parameters(
    writeback: bool, strategy: str
) -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(sharding_strategy=strategy)
        loss_of(model(rows(0))).backward()
        inside = _whole_gradients(front, model, factor=2, writeback=writeback)
        found.append((inside, _whole_gradients(front, model)))
    net = build()
    mean_gradients(net)
    same = up_to_order if strategy == "NO_SHARD" else equal
    same(found[0][0], gradients(net))
    up_to_order(found[0][0], found[1][0])
    factor = 2 if writeback else 1
    equal(found[0][1], {name: factor * grad for name, grad in found[0][0].items()})
    if strategy != "NO_SHARD":  # torch's gradients are whole there, and changed at once
        up_to_order(found[0][1], found[1][1])


@pytest.mark.cross
@pytest.mark.parametrize(
    "strategy", few(["FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP"], "FULL_SHARD", "NO_SHARD")
)
@pytest.mark.parametrize("offload", [False, True])
@distributed(2, 4, matrix=[4])
def test_gradients_are_whole_between_a_forward_and_its_backward(
    offload: bool, strategy: str
) -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(sharding_strategy=strategy)
        loss_of(model(rows(0))).backward()
        loss = loss_of(model(rows(1)))
        on_cpu = offload and front is OURS
        inside = _whole_gradients(front, model, factor=2, offload_to_cpu=on_cpu)
        loss.backward()
        found.append((inside, _whole_gradients(front, model)))
    up_to_order(found[0][0], found[1][0])
    close(found[0][1], found[1][1])


def _whole_gradients(
    front: Front, model: Any, *, factor: int = 1, **arguments: bool
) -> dict[str, torch.Tensor]:
    """The gradients, which are multiplied by ``factor`` in the end."""
    with quiet(), front.module.summon_full_params(model, with_grads=True, **arguments):
        found = {name: param.grad.clone() for name, param in model.named_parameters()}
        for param in model.parameters():
            param.grad.mul_(factor)
    return found


@pytest.mark.cross
@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
@pytest.mark.parametrize("writeback", [True, False])
@distributed(2, 4, matrix=[4])
def test_gradients_that_are_not_reduced_yet_are_shown_and_survive(
    writeback: bool, strategy: str
) -> None:
    found = []
    for front in (OURS, TORCH if strategy == "NO_SHARD" else OURS):  # torch shows whole ones only
        model = front.wrapped(sharding_strategy=strategy)
        loss_of(model(rows(0))).backward()
        with model.no_sync():
            loss_of(model(rows(1))).backward()
        factor = 2 if writeback else 1
        inside = _whole_gradients(front, model, factor=factor, writeback=writeback)
        loss_of(model(rows(2))).backward()
        found.append((inside, _whole_gradients(front, model)))
    close(found[0], found[1])
    net = build()
    mean_gradients(net)
    loss_of(net(rows(1))).backward()  # this rank's own
    close(found[0][0], gradients(net))
    net = build()
    for step in range(2):
        mean_gradients(net, step)
    for param in net.parameters() if writeback else ():
        param.grad = param.grad * 2 if param.grad is not None else None
    mean_gradients(net, 2)
    close(found[0][1], gradients(net))


@distributed(2, 4, matrix=[4])
def test_gradients_come_to_the_cpu_with_the_parameters() -> None:
    model = OURS.wrapped(mixed_precision=BF16)
    loss_of(model(rows(0))).backward()
    expected = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    with OURS.module.summon_full_params(model, with_grads=True, offload_to_cpu=True):
        equal({name: param.grad for name, param in model.named_parameters()}, expected)
        model.stem.weight.grad.zero_()
    assert not model.stem.weight.grad.full_tensor().any()
    equal(model.head.weight.grad.full_tensor(), expected["head.weight"])


@distributed(2, 4, matrix=[4])
def test_gradients_may_be_given_and_taken_away_inside() -> None:
    model = OURS.wrapped()
    loss_of(model(rows(0))).backward()
    model.head.weight.grad = None
    with OURS.module.summon_full_params(model, with_grads=True):
        assert model.head.weight.grad is None
        model.head.weight.grad = torch.ones_like(model.head.weight)
        model.stem.weight.grad = None
        with OURS.module.summon_full_params(model, with_grads=True):  # the outer one's
            assert model.stem.weight.grad is None
            model.stem.bias.grad.zero_()
    assert model.stem.weight.grad is None
    assert not model.stem.bias.grad.full_tensor().any()
    assert (model.head.weight.grad.full_tensor() == 1).all()


@distributed(2, 4, matrix=[4])
def test_one_rank_may_look_at_gradients_and_not_change_them() -> None:
    model = OURS.wrapped()
    loss_of(model(rows(0))).backward()
    expected = model.stem.weight.grad.full_tensor()
    arguments = {"with_grads": True, "rank0_only": True}
    with OURS.module.summon_full_params(model, writeback=False, **arguments):
        if dist.get_rank() == 0:
            equal(model.stem.weight.grad, expected)
    equal(model.stem.weight.grad.full_tensor(), expected)
    with (
        pytest.raises(ValueError, match="with_grads, rank0_only and writeback"),
        OURS.module.summon_full_params(model, **arguments),
    ):
        pass


@distributed(2, 4, matrix=[4])
def test_a_block_that_raises_changes_nothing_and_leaves_shards() -> None:
    model = OURS.wrapped()
    loss_of(model(rows(0))).backward()
    before = model.stem.weight.grad.full_tensor()
    with (
        pytest.raises(KeyError),
        OURS.module.summon_full_params(model, with_grads=True),
    ):
        with torch.no_grad():
            model.stem.weight.zero_()
        model.stem.weight.grad.zero_()
        raise KeyError
    equal(full_state(OURS, model), {n: p.detach() for n, p in build().named_parameters()})
    equal(model.stem.weight.grad.full_tensor(), before)


@distributed(2, 4, matrix=[4])
def test_a_forward_inside_gathers_nothing_where_dtypes_are_the_stored_ones() -> None:
    model = OURS.wrapped()
    with OURS.module.summon_full_params(model), torch.no_grad():
        inside = model(rows(0))
    with torch.no_grad():
        equal(model(rows(0)), inside)
    lower = OURS.wrapped(mixed_precision=BF16)
    with (
        OURS.module.summon_full_params(lower),
        pytest.raises(RuntimeError, match="no full parameters"),
        torch.no_grad(),
    ):
        lower(rows(0))
