"""What a wrapped module looks like: names, attributes, modules, ``apply``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from support.fsdp1_fronts import (
    OURS,
    TORCH,
    equal,
    full_state,
    loss_of,
    quiet,
    rows,
    steps_of,
    unsharded_steps,
    up_to_order,
)
from support.ranks import distributed
from support.surface.model import Block, Net, build


@distributed(2, 4, matrix=[4])
def test_names_are_those_of_the_unwrapped_model_in_its_order() -> None:
    net = build()
    params, buffers = list(dict(net.named_parameters())), list(dict(net.named_buffers()))
    for model in (OURS.wrapped(), OURS.wrapped(sharding_strategy="NO_SHARD")):
        outer = nn.Sequential(model)
        for _ in range(2):
            assert list(dict(model.named_parameters())) == params
            assert list(dict(model.named_buffers())) == buffers
            assert list(dict(outer.named_parameters())) == [f"0.{name}" for name in params]
            assert list(dict(model.named_parameters(prefix="a"))) == [f"a.{n}" for n in params]
            model(rows(0)).sum().backward()
        assert len(list(model.parameters())) == len(params)
        modules = [each for each in model.modules() if not isinstance(each, OURS.module)]
        assert len(modules) == len(list(net.modules())) == len(set(modules))
        kinds = [type(each).__name__.removeprefix("FSDP") for each in modules]
        assert [kind.removeprefix("Replicate") for kind in kinds] == [
            type(each).__name__ for each in net.modules()
        ]
        assert model.get_parameter("blocks.0.fc1.weight") is model.blocks[0].fc1.weight
    with quiet(), TORCH.module.summon_full_params(torchs := TORCH.wrapped()):
        assert list(dict(torchs.named_parameters())) == params


@distributed(2, 4, matrix=[4])
def test_attributes_and_items_are_those_of_the_wrapped_module() -> None:
    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.answer = 42

        def twice(self, x: int) -> int:
            return 2 * x

    model = OURS.wrapped(Own())
    assert model.module is model._fsdp_wrapped_module
    assert isinstance(model.module, Own)
    assert (model.answer, model.twice(4)) == (42, 8)
    assert model.stem is model.module.stem
    inside: Any = model.module.blocks[0]
    assert model.blocks[0].fc1 is inside.module.fc1
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = model.nothing_like_it
    layers = OURS.wrapped(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), auto_wrap_policy=None)
    assert layers[1] is layers.module[1]
    assert [type(each) for each in layers] == [nn.Linear, nn.ReLU]


@distributed(2, 4, matrix=[4])
def test_instances_are_found_from_above_and_the_outermost_only_on_demand() -> None:
    model = OURS.wrapped()
    kind = OURS.module
    assert kind.fsdp_modules(model) == [model, *model.blocks]
    assert kind.fsdp_modules(model, root_only=True) == [model]
    both = nn.ModuleList([model, other := OURS.wrapped()])
    assert kind.fsdp_modules(both, root_only=True) == [model, other]
    assert kind.fsdp_modules(nn.Linear(1, 1)) == []
    with pytest.raises(TypeError, match="module is a int"):
        kind.fsdp_modules(3)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@distributed(2, 4, matrix=[4])
def test_apply_sees_and_keeps_full_parameters_in_full_precision(dtype: Any) -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(mixed_precision={"param_dtype": dtype})
        seen: list[Any] = []

        def fill(module: nn.Module, seen: list[Any] = seen) -> None:
            if isinstance(module, nn.Linear):
                seen.append((module.weight.shape, module.weight.dtype))
                with torch.no_grad():
                    module.weight.fill_(1 / 3)

        with quiet():
            assert model.apply(fill) is model
        found.append((seen, full_state(front, model)))
    assert found[0][0] == found[1][0]
    equal(found[0][1], found[1][1])
    third = torch.tensor(1 / 3)
    assert all((v == third).all() for n, v in found[0][1].items() if n.endswith("weight"))


@distributed(2, 4, matrix=[4])
def test_zero_grad_clears_sharded_and_unsharded_gradients() -> None:
    model = OURS.wrapped(sharding_strategy="SHARD_GRAD_OP")
    with model.no_sync():
        loss_of(model(rows(0))).backward()
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    loss_of(model(rows(1))).backward()
    fresh = OURS.wrapped(sharding_strategy="SHARD_GRAD_OP")
    loss_of(fresh(rows(1))).backward()
    grads = [{n: p.grad.full_tensor() for n, p in m.named_parameters()} for m in (model, fresh)]
    equal(grads[0], grads[1])
    model.zero_grad(set_to_none=False)
    assert all((param.grad.to_local() == 0).all() for param in model.parameters())


def _checkpointed(front: Any, when: str) -> Any:
    net: Any = build()
    if when == "before":
        net.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in net.blocks)
        return front.wrapped(net, auto_wrap_policy=front.wrap.ModuleWrapPolicy({CheckpointWrapper}))
    model = front.wrapped(net)
    inside = {each.module for each in model.blocks}
    apply_activation_checkpointing(model, check_fn=lambda module: module in inside)
    return model


@pytest.mark.parametrize("when", ["before", "after"])
@distributed(2, 4, matrix=[4])
def test_checkpointed_blocks_train_as_torchs_wrapped_before_or_after(when: str) -> None:
    ours = _checkpointed(OURS, when)
    block = ours.blocks[0]
    assert isinstance(block._fsdp_wrapped_module, CheckpointWrapper)
    assert isinstance(block.module, Block)
    result = steps_of(OURS, ours)
    equal(list(result[1].values()), list(unsharded_steps()[1].values()))
    up_to_order(result[0], steps_of(TORCH, _checkpointed(TORCH, when))[0])
    assert list(ours.state_dict()) == list(build().state_dict())
