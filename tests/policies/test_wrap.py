"""Automatic wrapping: which modules become groups of their own, by class, size or own policy."""

from __future__ import annotations

from collections.abc import Callable
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


def _wider() -> nn.Module:
    net = build()
    net.blocks.append(_Wide())
    return net


def _sharded_before(*parts: str) -> nn.Module:
    net = build()
    for part in parts:
        fully_shard(net.get_submodule(part))
    return net


def _used_twice() -> nn.Module:
    block = Block()
    return nn.Sequential(nn.Sequential(block), nn.Sequential(block))


def _with_a_container() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])))


def _tied() -> nn.Module:
    """16 elements in two places."""
    model = in_turn(pair=nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))))
    model.pair[1].weight = model.pair[0].weight
    return model


BLOCK = 1 + (WIDTH + 1) * WIDTH + (WIDTH + 1) + WIDTH * (WIDTH + 1) + WIDTH
BLOCKS = "(root) blocks.0 blocks.1"
LINEARS = "stem blocks.0 blocks.0.fc1 blocks.0.fc2 blocks.1 blocks.1.fc1 blocks.1.fc2 head"
SELECTED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "subclasses, too": (_wider, ClassWrap(Block), f"{BLOCKS} blocks.2"),
    "one class inside another": (build, ClassWrap({Block, nn.Linear}), f"(root) {LINEARS}"),
    "one of two classes": (
        lambda: nn.Sequential(nn.Linear(2, 2)),
        ClassWrap({nn.Conv2d, nn.Linear}),
        "(root) 0",
    ),
    "the root only": (lambda: nn.Linear(2, 2), ClassWrap(nn.Linear), "(root)"),
    "the root, too": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2))),
        ClassWrap(nn.Sequential),
        "(root) 0",
    ),
    "all are sharded": (
        lambda: _sharded_before("blocks.0", "blocks.1"),
        ClassWrap(Block),
        BLOCKS,
    ),
    "nothing below what is sharded": (
        lambda: _sharded_before("blocks.0"),
        ClassWrap((Block, nn.Linear)),
        "(root) stem blocks.0 blocks.1 blocks.1.fc1 blocks.1.fc2 head",
    ),
    "a module that is used twice once": (_used_twice, ClassWrap(Block), "(root) 0.0"),
    "by default only large ones": (build, SizeWrap(), "(root)"),
    "as many elements": (build, SizeWrap(min_numel=BLOCK), BLOCKS),
    "one more": (build, SizeWrap(min_numel=BLOCK + 1), "(root)"),
    # 49 in fc1, then 48 in fc2 and 1 beside it are left in a block
    "what is left": (
        build,
        SizeWrap(min_numel=49),
        "(root) blocks.0 blocks.0.fc1 blocks.1 blocks.1.fc1",
    ),
    "the parts first": (
        build,
        SizeWrap(min_numel=WIDTH * WIDTH + WIDTH),
        "(root) stem blocks.0.fc1 blocks.0.fc2 blocks.1.fc1 blocks.1.fc2",
    ),
    "what contains one without a forward": (_with_a_container, SizeWrap(min_numel=12), "(root) 0"),
    "tied elements once": (_tied, SizeWrap(min_numel=17), "(root)"),
    "as many tied elements": (_tied, SizeWrap(min_numel=16), "(root) pair.0"),
}


@pytest.mark.parametrize("name", SELECTED)
@distributed(2)
def test_what_a_policy_selects_and_the_root_become_groups(name: str) -> None:
    make, policy, expected = SELECTED[name]
    net = make()
    assert wrap(net, policy) is net
    assert [each or "(root)" for each in _sharded_names(net)] == expected.split()


@distributed(2)
def test_classes_that_a_model_lacks_are_an_error_before_anything_is_sharded() -> None:
    net = build()
    with pytest.raises(ValueError, match=r"Conv2d.* selects no module of .* Block, .*Linear"):
        wrap(net, ClassWrap(nn.Conv2d))
    assert _sharded_names(net) == []


@pytest.mark.parametrize("wrong", [3, (Block, 3), ("Block",), (nn.Linear(1, 1),), (int,), []])
def test_what_is_no_module_class_is_an_error(wrong: Any) -> None:
    kind, said = (TypeError, r"classes .*nn\.Module") if wrong else (ValueError, "classes is empty")
    with pytest.raises(kind, match=said):
        ClassWrap(wrong)


def test_the_classes_are_kept_as_a_tuple_so_that_the_policy_is_a_value() -> None:
    assert ClassWrap(Block) == ClassWrap([Block])
    assert hash(ClassWrap(Block)) == hash(ClassWrap((Block,)))


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
