"""Which modules become instances: every policy against torch's, and what is left alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.wrappers.wrap import CustomPolicy, ModuleWrapPolicy
from support.fsdp1_fronts import OURS, TORCH, Front, equal, quiet, rows, steps_of, up_to_order
from support.modules import in_turn
from support.products import few
from support.ranks import distributed
from support.surface.model import Block, build


class Parts(nn.Module):
    """Containers, attention, and a module that is held twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), self.shared])
        self.named = nn.ModuleDict({"one": nn.Sequential(nn.Linear(6, 8), nn.ReLU())})
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(x)
        for layer in self.layers:
            x = layer(x)
        x = self.named["one"](x)[None]
        return self.head(self.attention(x, x, x)[0])


def _policy(front: Front, kind: str) -> Any:
    wrap = front.wrap
    policies: dict[str, Callable[[], Any]] = {
        "class": lambda: wrap.ModuleWrapPolicy({nn.Linear, nn.Sequential}),
        "transformer": lambda: functools.partial(
            wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}
        ),
        "lambda": lambda: functools.partial(
            wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Sequential)
        ),
        "size": lambda: functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=50),
        "small": lambda: functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=10),
        "leaves": lambda: functools.partial(
            wrap.size_based_auto_wrap_policy,
            min_num_params=10,
            force_leaf_modules={nn.ModuleDict},
            exclude_wrap_modules={nn.ModuleList, nn.Linear},
        ),
        "own": lambda: _of_56_elements,
        "custom": lambda: wrap.CustomPolicy(lambda m: isinstance(m, nn.Sequential)),
        "overrides": lambda: wrap.CustomPolicy(
            lambda m: (
                {"sharding_strategy": front.ShardingStrategy.SHARD_GRAD_OP}
                if isinstance(m, nn.Linear)
                else {}
            )
        ),
    }
    return policies[kind]()


def _of_56_elements(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or nonwrapped_numel == 56


def _chosen(front: Front, model: nn.Module) -> list[tuple[str, str]]:
    return sorted(
        {
            (
                name.replace("_fsdp_wrapped_module.", "").replace("._fsdp_wrapped_module", ""),
                module.sharding_strategy.name,
            )
            for name, module in model.named_modules()
            if isinstance(module, front.module)
        }
    )


def _unshared() -> nn.Module:
    """Torch wraps a module that is held twice only in the first place."""
    parts = Parts()
    parts.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    return parts


KINDS = ["class", "transformer", "lambda", "size", "small", "leaves", "own", "custom", "overrides"]


@pytest.mark.parametrize(
    "kind", few(KINDS, "class", "transformer", "lambda", "size", "leaves", "own")
)
@distributed(2, 4, matrix=[4])
def test_a_policy_chooses_what_torchs_chooses(kind: str) -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(_unshared(), auto_wrap_policy=_policy(front, kind))
        found.append(_chosen(front, model))
    ours, theirs = found
    if kind in ("class", "transformer", "overrides"):  # torch wraps the linear in attention too
        assert ours == theirs
        assert any("attention.out_proj" in name for name, _ in ours)
    assert ours == theirs
    assert len(ours) > 1


@distributed(2, 4, matrix=[4])
def test_always_wraps_every_module_with_a_forward() -> None:
    model = OURS.wrapped(build(), auto_wrap_policy=OURS.wrap.always_wrap_policy)
    names = {name for name, _ in _chosen(OURS, model)}
    blocks = {f"blocks.{i}{rest}" for i in (0, 1) for rest in ("", ".fc1", ".fc2")}
    assert names == {"", "stem", "head", *blocks}
    theirs = TORCH.wrapped(build(), auto_wrap_policy=TORCH.wrap.always_wrap_policy)
    assert {name for name, _ in _chosen(TORCH, theirs)} == {*names, "blocks"}
    up_to_order(steps_of(OURS, model), steps_of(TORCH, theirs))


@distributed(2, 4, matrix=[4])
def test_a_module_held_twice_is_one_instance_in_both_places() -> None:
    for kind in ("class", "size"):
        policy = _policy(OURS, kind)
        if kind == "size":
            policy = functools.partial(OURS.wrap.size_based_auto_wrap_policy, min_num_params=20)
        model = OURS.wrapped(Parts(), auto_wrap_policy=policy)
        assert isinstance(model.shared, OURS.module)
        assert model.layers[1] is model.shared


@distributed(2, 4, matrix=[4])
def test_a_custom_policy_that_says_neither_is_an_error() -> None:
    with pytest.raises(ValueError, match="returned 'yes' for"):
        OURS.wrapped(build(), auto_wrap_policy=CustomPolicy(lambda m: "yes"))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="auto_wrap_policy is 3"):
        OURS.wrapped(build(), auto_wrap_policy=3)


def test_a_policy_of_classes_checks_them_and_shows_them() -> None:
    with pytest.raises(TypeError, match=r"pass subclasses of nn\.Module"):
        ModuleWrapPolicy([int])  # type: ignore[list-item]
    policy = ModuleWrapPolicy([Block])
    assert repr(policy) == "ModuleWrapPolicy({Block})"
    assert policy(nn.Linear(1, 1), True, 0) and not policy(nn.Linear(1, 1), False, 0)


@distributed(2, 4, matrix=[4])
def test_wrap_wraps_inside_enable_wrap_only_with_its_arguments() -> None:
    found = []
    for front in (OURS, TORCH):
        wrap = front.wrap
        strategy = front.ShardingStrategy

        def own(wrap: Any = wrap, strategy: Any = strategy) -> Any:
            torch.manual_seed(0)
            return in_turn(
                first=wrap.wrap(nn.Linear(6, 6)),
                last=wrap.wrap(nn.Linear(6, 2), sharding_strategy=strategy.SHARD_GRAD_OP),
            )

        assert type(own().first) is nn.Linear
        arguments = {"use_orig_params": True, "device_id": torch.device("cpu")}
        with quiet(), wrap.enable_wrap(wrapper_cls=front.module, **arguments):
            model = wrap.wrap(own())
        assert type(own().first) is nn.Linear
        found.append((_chosen(front, model), steps_of(front, model)))
    assert found[0][0] == found[1][0]
    assert [strategy for _, strategy in found[0][0]] == [
        "FULL_SHARD",
        "FULL_SHARD",
        "SHARD_GRAD_OP",
    ]
    up_to_order(found[0][1], found[1][1])


@distributed(2, 4, matrix=[4])
def test_enable_wrap_may_be_nested_and_the_innermost_counts() -> None:
    wrap = OURS.wrap
    with wrap.enable_wrap(wrapper_cls=OURS.module):
        with wrap.enable_wrap(wrapper_cls=lambda module, **kwargs: nn.Sequential(module)):
            assert type(wrap.wrap(nn.Linear(1, 1))) is nn.Sequential
        assert isinstance(wrap.wrap(nn.Linear(1, 1)), OURS.module)


@distributed(2, 4, matrix=[4])
def test_what_is_wrapped_already_stays_as_it_is_under_a_policy() -> None:
    net = build()
    net.blocks[0] = OURS.wrapped(net.blocks[0], auto_wrap_policy=None)
    first = net.blocks[0]
    model = OURS.wrapped(net)
    assert model.blocks[0] is first
    assert isinstance(model.blocks[1], OURS.module)
    up_to_order(steps_of(OURS, model), steps_of(TORCH, TORCH.wrapped()))


@distributed(2, 4, matrix=[4])
def test_ignored_modules_and_parameters_stay_what_they_were() -> None:
    found = []
    for front in (OURS, TORCH):
        for name in ("ignored_modules", "ignored_states", "parameters"):
            net = build()
            block, scale = net.blocks[1], net.blocks[0].scale
            head = net.head
            argument: dict[str, Any] = {"ignored_states": [scale]}
            if name != "parameters":
                argument = {name: [block, head]}
            before = list(head.parameters())
            model = front.wrapped(net, **argument)
            if name != "parameters":
                assert model.blocks[1] is block and model.head is head
                assert all(
                    one is other for one, other in zip(before, head.parameters(), strict=True)
                )
            else:
                assert model.blocks[0].scale is scale
            model(rows(0)).sum().backward()
            if name == "parameters":
                assert scale.grad is None or scale.grad.shape == scale.shape
            kept = [scale] if name == "parameters" else list(head.parameters())
            found.append([param.grad for param in kept])
    equal(found[:3], found[3:])


@distributed(2, 4, matrix=[4])
def test_what_a_nested_instance_ignores_its_parent_ignores_too() -> None:
    net = build()
    scale = net.blocks[0].scale
    net.blocks[0] = OURS.wrapped(net.blocks[0], ignored_states=[scale], auto_wrap_policy=None)
    model = OURS.wrapped(net, auto_wrap_policy=None)
    assert model.blocks[0].scale is scale
    assert type(scale) is nn.Parameter
