"""After ranks that part in a collective, ``verify`` works in the same process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import CollectiveMismatchError
from fullshard.preflight import Verdict, verify
from fullshard.samehost import SharedMemoryError, SharedMemoryTransport
from fullshard.samehost.automatic import shares_memory
from fullshard.sharding import fully_shard
from support.modules import Assembled
from support.products import few
from support.ranks import distributed

WIDTH = 8


def _dropped(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Skips each layer with the model's probability, as wav2vec2 does (LayerDrop)."""
    for layer in model.layers:
        if float(torch.rand(())) >= model.drop:
            x = x + torch.tanh(layer(x))
    return x


def _diverging(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Skips the first layer on rank 1, once both have made a step."""
    model.calls += 1
    is_sharded = any(hasattr(each, "to_local") for each in model.parameters())
    skips = is_sharded and dist.get_rank() == 1 and model.calls > 1
    for layer in list(model.layers)[skips:]:
        x = x + torch.tanh(layer(x))
    return x


def _shard(model: Any) -> None:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def _batch(step: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(2, 4, WIDTH, generator=generator).unbind()


def _loss(model: nn.Module, given: Any) -> torch.Tensor:
    return (model(given[0]) - given[1]).square().mean()


def _verdict_of(run: Any, layers: bool, **options: Any) -> Verdict:
    def build() -> nn.Module:
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        return Assembled(run, layers=layers, drop=options.get("drop", 0.0), calls=0)

    aligned = bool(options.get("drop"))
    return verify(build, _shard, _batch, _loss, layers=layers, steps=2, aligned_seeds=aligned)


_NAMES = ("whole", "by layer")
whole_first = pytest.mark.parametrize("layers", few([False, True], False), ids=_NAMES)
by_layer_first = pytest.mark.parametrize("layers", few([False, True], True), ids=_NAMES)


def _shares_memory() -> bool:
    world = dist.group.WORLD
    assert world is not None, "there is one"
    return shares_memory(world, torch.device("cpu"))


@whole_first
@distributed(2)
def test_ranks_that_skip_layers_at_random_are_refused_and_leave_nothing_behind(
    layers: bool,
) -> None:
    with pytest.raises(CollectiveMismatchError, match=r"rank 0 gathers layers\.\d, rank 1 gathers"):
        _verdict_of(_dropped, layers, drop=0.5)
    for _ in range(2):
        assert _verdict_of(_dropped, layers).equal
    assert _shares_memory()


@by_layer_first
@distributed(2)
def test_so_are_ranks_that_part_in_a_later_step(layers: bool) -> None:
    with pytest.raises(CollectiveMismatchError, match=r"layers\.0, rank 1 gathers layers\.1"):
        _verdict_of(_diverging, layers)
    assert _verdict_of(_dropped, layers).equal


@whole_first
@distributed(2, fresh=True)  # the memory of these processes stays out of use
def test_where_ranks_have_parted_before_it_does_without_the_memory_they_shared(
    layers: bool,
) -> None:
    world, memory = dist.group.WORLD, SharedMemoryTransport()
    assert world is not None, "there is one"
    memory.all_gather(torch.zeros(2), torch.zeros(1), world, False)
    with pytest.raises(CollectiveMismatchError):
        if dist.get_rank() == 0:
            memory.all_gather(torch.zeros(2), torch.zeros(1), world, False)
        else:
            memory.reduce_scatter(torch.zeros(1), torch.zeros(2), world, dist.ReduceOp.SUM, False)
    with pytest.raises(SharedMemoryError, match="out of use"):
        memory.all_gather(torch.zeros(2), torch.zeros(1), world, False)
    for _ in range(2):
        assert _verdict_of(_dropped, layers).equal
        assert _shares_memory(), "it is as the user has set it"
    with pytest.raises(CollectiveMismatchError, match=r"layers\.0, rank 1 gathers layers\.1"):
        _verdict_of(_diverging, layers)
