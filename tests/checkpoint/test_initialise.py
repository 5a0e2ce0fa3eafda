"""Initial values on any mesh, against those of the unsharded model after the same call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from checkpoint.layouts import SECOND_CUTS
from fullshard.checkpoint import initialise
from fullshard.sharding import fully_shard, unsharded
from support.live_memory import LiveMemory
from support.modules import Held
from support.ranks import cpu_mesh, distributed
from support.surface.model import Net, batch, build
from support.surface.ranks import assert_equal_state, everyone
from support.surface.ranks import full_parameters as values
from support.surface.wrappings import WRAPPINGS, Wrapped, hybrid

SEED = 3


def draw(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Uneven values, of which none is like another."""
    nn.init.normal_(tensor, std=0.02 if tensor.ndim > 1 else 1.0, generator=generator)


def noting(seen: list[str], name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """The same, with the names."""
    seen.append(name)
    draw(name, tensor, generator)


def expected(model: Any) -> dict[str, torch.Tensor]:
    """The definition: the unsharded model after the same call."""
    initialise(model, draw, SEED)
    return values(model)


@pytest.mark.parametrize("wrapping", [*WRAPPINGS, "hybrid"])
@pytest.mark.cross
@distributed(2, 1, 3, 4, matrix=[1, 4])
def test_values_are_the_unsharded_models_on_any_mesh(wrapping: str, world_size: int) -> None:
    if wrapping == "hybrid" and world_size % 2:
        return
    net = hybrid(build(1)) if wrapping == "hybrid" else WRAPPINGS[wrapping](build(1))
    initialise(net, draw, SEED)
    assert_equal_state(values(net), expected(build(2)))


@pytest.mark.parametrize("wrapping", ["blocks", "columns"])
@distributed(2, 4, matrix=[4])
def test_a_model_from_the_meta_device_gets_them(wrapping: str) -> None:
    with torch.device("meta"):
        net = Net()
    WRAPPINGS[wrapping](net).to_empty(device="cpu")
    initialise(net, draw, SEED)
    assert_equal_state(values(net), expected(build()))


@pytest.mark.parametrize("layout", SECOND_CUTS)
@distributed(4)
def test_parameters_that_are_cut_twice_tied_or_not_sharded_get_them(layout: str) -> None:
    model, whole = SECOND_CUTS[layout]()
    seen: list[str] = []
    initialise(model, partial(noting, seen), SEED)
    assert seen == list(whole)
    found = dict(zip(seen, values(model).values(), strict=True))
    assert_equal_state(found, expected(Held(whole)))


@distributed(2)
def test_experts_of_another_library_that_nobody_shards_get_them() -> None:
    stacked = torch.zeros(4, 6, 5)
    model = Held({"weights": stacked, "router.weight": torch.zeros(4, 6)})
    plain = expected(copy.deepcopy(model))
    model.weights = nn.Parameter(distribute_tensor(stacked, cpu_mesh(), [Shard(0)]))
    fully_shard(model, ignored_params={model.weights})
    initialise(model, draw, SEED)
    assert_equal_state(values(model), plain)


def _checkpointed(net: Any) -> Any:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = checkpoint_wrapper(block)
    return net


def _compiled(net: Any) -> Any:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = torch.compile(block, backend="eager")
    return torch.compile(net, backend="eager")


@pytest.mark.parametrize("wrap", [_checkpointed, _compiled, Wrapped], ids=lambda fn: fn.__name__)
@distributed(2)
def test_what_wrappers_put_into_names_changes_no_value(wrap: Callable[[Any], Any]) -> None:
    net = fully_shard(wrap(build(1)))
    seen: list[str] = []
    initialise(net, partial(noting, seen), SEED)
    plain = expected(build(2))
    assert seen == list(plain)
    assert_equal_state(dict(zip(seen, values(net).values(), strict=True)), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@distributed(2)
def test_values_are_drawn_in_float32_and_cast(dtype: torch.dtype) -> None:
    model = fully_shard(nn.Linear(4, 3, dtype=dtype))
    initialise(model, draw, SEED)
    drawn = expected(nn.Linear(4, 3, dtype=torch.complex64 if dtype.is_complex else None))
    assert_equal_state(values(model), {name: value.to(dtype) for name, value in drawn.items()})


@distributed(2)
def test_frozen_parameters_get_values_and_buffers_are_left_alone() -> None:
    net = build()
    net.stem.requires_grad_(False)
    net.steps.fill_(7)
    fully_shard(net)
    initialise(net, draw, SEED)
    assert_equal_state(values(net), expected(build(1)))
    assert net.steps.item() == 7
    assert not net.stem.weight.requires_grad and net.head.weight.requires_grad


@distributed(2)
def test_neither_order_nor_company_changes_a_parameters_values() -> None:
    alone = nn.ModuleDict({"head": fully_shard(nn.Linear(6, 3))})
    initialise(alone, draw, SEED)
    among = expected(build())
    assert_equal_state(values(alone), {name: among[name] for name in ("head.weight", "head.bias")})
    drawn = [value.flatten()[:1].item() for value in among.values()]
    assert len(set(drawn)) == len(drawn)  # no two parameters draw the same numbers
    initialise(alone, draw, SEED + 1)
    assert not torch.equal(values(alone)["head.weight"], among["head.weight"])


@distributed(2)
def test_copies_kept_from_before_are_not_used_after_it() -> None:
    kept = fully_shard(build(), reshard_after_forward=False)
    with torch.no_grad():
        kept(batch())
    kept.unshard()
    initialise(kept, draw, SEED)
    assert all(isinstance(param, DTensor) for param in kept.parameters())  # no stale values
    plain = build()
    initialise(plain, draw, SEED)
    assert torch.equal(kept(batch()), plain(batch()))


@distributed(2)
def test_memory_grows_by_one_whole_parameter() -> None:
    layers = [nn.Linear(256, 256, bias=False) for _ in range(6)]
    model = fully_shard(nn.Sequential(*layers))
    largest = 256 * 256 * 4
    with LiveMemory() as memory:
        initialise(model, draw, SEED)
    assert largest <= memory.peak < 1.1 * largest


@distributed(2)
def test_it_sends_nothing_and_one_rank_alone_may_call_it() -> None:
    model = fully_shard(build())
    if dist.get_rank() == 0:
        initialise(model, draw, SEED)
    changed = everyone(True)
    assert all(changed)
    local = next(model.parameters())
    assert isinstance(local, DTensor)
    mine = expected(build(1))["stem.weight"].chunk(2)[dist.get_rank()]
    assert torch.equal(local.to_local(), mine) == (dist.get_rank() == 0)


@distributed(2)
def test_wrong_calls_are_errors_that_say_what_to_do() -> None:
    with torch.device("meta"):
        meta = fully_shard(Net())
    with pytest.raises(ValueError, match=r"stem\.weight, .* and more are on the meta.*to_empty"):
        initialise(meta, draw, SEED)
    net = fully_shard(build())
    with pytest.raises(ValueError, match=r"left some elements of stem\.weight, shape \(6, 6\)"):
        initialise(net, lambda _, tensor, __: tensor[:2].zero_(), SEED)
    with pytest.raises(ValueError, match="left all elements of stem"):
        initialise(net, lambda *_: None, SEED)
    with unsharded(net), pytest.raises(RuntimeError, match="call it outside of the block"):
        initialise(net, draw, SEED)
    wrong: list[tuple[Any, ...]] = [("net", draw, 0), (net, "normal", 0), (net, draw, 0.5)]
    for arguments in wrong:
        with pytest.raises(TypeError, match="pass a"):
            initialise(*arguments)
