"""Automatic wrapping: which modules become groups of their own, by class, size or own policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.policies import ClassWrap, MixedPrecisionPolicy, SizeWrap, wrap
from fullshard.sharding import FSDPModule, fully_shard
from support.modules import in_turn
from support.ranks import distributed
from support.surface.model import WIDTH, Block, batch, build


def _sharded_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


class _Wide(Block):
    """A subclass counts as its base."""


# -- by class -------------------------------------------------------------------------------------


@distributed(2)
def test_every_module_of_the_class_and_the_root_become_groups() -> None:
    net = build()
    net.blocks.append(_Wide())
    assert wrap(net, ClassWrap(Block)) is net
    assert _sharded_names(net) == ["", "blocks.0", "blocks.1", "blocks.2"]


@distributed(2)
def test_several_classes_wrap_inside_each_other_innermost_first() -> None:
    net = wrap(build(), ClassWrap({Block, nn.Linear}))
    inner = [f"blocks.{i}{part}" for i in range(2) for part in ("", ".fc1", ".fc2")]
    assert _sharded_names(net) == ["", "stem", *inner, "head"]


@distributed(2)
def test_classes_that_a_model_lacks_are_an_error_before_anything_is_sharded() -> None:
    net = build()
    with pytest.raises(ValueError, match=r"Conv2d.* selects no module of .* Block, .*Linear"):
        wrap(net, ClassWrap(nn.Conv2d))
    assert _sharded_names(net) == []
    assert _sharded_names(wrap(net, ClassWrap({nn.Conv2d, nn.Linear}))) != []


@distributed(2)
def test_a_class_that_only_the_root_or_sharded_modules_have_is_no_error() -> None:
    assert _sharded_names(wrap(nn.Linear(2, 2), ClassWrap(nn.Linear))) == [""]
    net = build()
    for block in net.blocks:
        fully_shard(block)
    assert _sharded_names(wrap(net, ClassWrap(Block))) == ["", "blocks.0", "blocks.1"]


@distributed(2)
def test_the_root_is_sharded_once_where_it_is_selected_itself() -> None:
    net = wrap(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), ClassWrap(nn.Sequential))
    assert _sharded_names(net) == ["", "0"]


@pytest.mark.parametrize("wrong", [3, (Block, 3), ("Block",), (nn.Linear(1, 1),), (int,), []])
def test_what_is_no_module_class_is_an_error(wrong: Any) -> None:
    kind, said = (TypeError, r"classes .*nn\.Module") if wrong else (ValueError, "classes is empty")
    with pytest.raises(kind, match=said):
        ClassWrap(wrong)


def test_the_classes_are_kept_as_a_tuple_so_that_the_policy_is_a_value() -> None:
    assert ClassWrap(Block) == ClassWrap([Block])
    assert hash(ClassWrap(Block)) == hash(ClassWrap((Block,)))


# -- by size --------------------------------------------------------------------------------------

BLOCK = 1 + (WIDTH + 1) * WIDTH + (WIDTH + 1) + WIDTH * (WIDTH + 1) + WIDTH


@pytest.mark.parametrize(
    ("min_numel", "expected"),
    [
        (10_000_000, [""]),  # the default: the root is always sharded
        (BLOCK, ["", "blocks.0", "blocks.1"]),
        (BLOCK + 1, [""]),
        # 49 in fc1, then 48 in fc2 and 1 beside it are left in a block
        (49, ["", "blocks.0", "blocks.0.fc1", "blocks.1", "blocks.1.fc1"]),
        (
            WIDTH * WIDTH + WIDTH,
            ["", "stem", "blocks.0.fc1", "blocks.0.fc2", "blocks.1.fc1", "blocks.1.fc2"],
        ),
    ],
)
@distributed(2)
def test_a_module_with_enough_elements_that_are_in_no_group_yet_becomes_one(
    min_numel: int, expected: list[str]
) -> None:
    assert _sharded_names(wrap(build(), SizeWrap(min_numel=min_numel))) == expected


@distributed(2)
def test_a_container_without_a_forward_is_passed_over_but_its_elements_count() -> None:
    net = nn.Sequential(nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])))
    wrap(net, SizeWrap(min_numel=12))
    assert _sharded_names(net) == ["", "0"]


@distributed(2)
def test_tied_elements_count_once() -> None:
    def tied() -> nn.Module:
        model = in_turn(pair=nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))))
        model.pair[1].weight = model.pair[0].weight
        return model

    assert _sharded_names(wrap(tied(), SizeWrap(min_numel=17))) == [""]
    assert _sharded_names(wrap(tied(), SizeWrap(min_numel=16))) == ["", "pair.0"]


@pytest.mark.parametrize(
    ("wrong", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_a_wrong_size_is_an_error(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^min_numel is .*pass a"):
        SizeWrap(min_numel=wrong)


# -- by a user's policy ---------------------------------------------------------------------------


class _ByName:
    """Selects by name, and notes what it was asked."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.asked: list[tuple[str, int]] = []

    def selects(self, name: str, module: nn.Module, numel: int) -> bool:
        self.asked.append((name, numel))
        return name in self.names


@distributed(2)
def test_a_policy_is_asked_once_per_module_bottom_up_with_the_elements_left() -> None:
    policy = _ByName("blocks.0.fc1", "blocks.0")
    net = wrap(build(), policy)
    assert _sharded_names(net) == ["", "blocks.0", "blocks.0.fc1"]
    left = BLOCK - (WIDTH + 1) * (WIDTH + 1)
    assert policy.asked == [
        ("stem", 42),
        ("blocks.0.fc1", 49),
        ("blocks.0.fc2", 48),
        ("blocks.0", left),
        ("blocks.1.fc1", 49),
        ("blocks.1.fc2", 48),
        ("blocks.1", BLOCK),
        ("blocks", BLOCK),
        ("head", 21),
    ]


@distributed(2)
def test_what_was_sharded_before_is_left_alone() -> None:
    net = build()
    fully_shard(net.blocks[0])
    wrap(net, ClassWrap((Block, nn.Linear)))
    assert "blocks.0.fc1" not in _sharded_names(net)
    assert "blocks.1.fc1" in _sharded_names(net)


@distributed(2)
def test_a_module_that_is_used_twice_is_wrapped_once() -> None:
    block = Block()
    net = wrap(nn.Sequential(nn.Sequential(block), nn.Sequential(block)), ClassWrap(Block))
    assert _sharded_names(net) == ["", "0.0"]
    net(batch()).sum().backward()


@distributed(2)
def test_the_other_arguments_reach_every_call() -> None:
    seen = []
    net = build()
    for module in (net.head, net.blocks[0].fc1):
        module.register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))  # type: ignore[union-attr]  # a Linear
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    wrap(net, ClassWrap(Block), mp_policy=policy)
    net(batch())
    assert seen == [torch.bfloat16, torch.bfloat16]


@distributed(2)
def test_an_ignored_parameter_does_not_count() -> None:
    net = build()
    block: Any = net.blocks[0]
    wrap(net, SizeWrap(min_numel=BLOCK), ignored_params={block.scale})
    assert _sharded_names(net) == ["", "blocks.1"]


@distributed(2)
def test_a_policy_without_the_method_is_an_error_that_names_it() -> None:
    net = build()
    with pytest.raises(TypeError, match=r"policy is a .*lacks selects"):
        wrap(net, object())  # type: ignore[arg-type]  # the point
    assert _sharded_names(net) == []
