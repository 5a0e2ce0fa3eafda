"""``verify(layers=...)`` compares a model layer by layer, in the memory of one layer."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.preflight import Verdict, verify
from fullshard.preflight.verification import room
from fullshard.preflight.verification.layers.copies import layer_names
from fullshard.sharding import fully_shard
from support.modules import Assembled
from support.ranks import distributed
from support.verification.fault import batch, build, loss, shard

WIDTH = 37


def verdict_of(**changes: Any) -> Verdict:
    program = {"build_model": build, "shard": shard, "batch": batch, "loss": loss}
    return verify(**{**program, "steps": 2, "layers": True, **changes})


class Block(nn.Module):
    """A residual layer with dropout, which says how many full weights are alive as it runs."""

    alive = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Block.alive = max(Block.alive, _full_weights())
        return x + nn.functional.dropout(x @ self.weight, 0.25)


def _run(model: Any, x: torch.Tensor) -> Any:
    x = x.requires_grad_()
    for block in model.blocks:
        if model.recomputed is None:
            x = block(x)
        else:
            x = checkpoint(block, x, use_reentrant=model.recomputed)
    return x * model.scale


def deep(depth: int = 12, recomputed: bool | None = None) -> nn.Module:
    blocks, scale = nn.ModuleList(Block() for _ in range(depth)), nn.Parameter(torch.ones(WIDTH))
    return Assembled(_run, blocks=blocks, scale=scale, recomputed=recomputed)


def _full_weights() -> int:
    """How many storages of a whole weight's size are alive."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    nbytes = 4 * WIDTH * WIDTH
    storages = [each.untyped_storage() for each in tensors if each.device.type == "cpu"]
    return len({each.data_ptr() for each in storages if each.nbytes() == nbytes})


def on_meta(**arguments: Any) -> nn.Module:
    with torch.device("meta"):
        return deep(**arguments)


def with_values(model: Any) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(5 + dist.get_rank())
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().normal_(std=0.1)


def wide_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs, targets = torch.randn(2, 3, WIDTH, generator=generator).unbind()
    return inputs, targets


@distributed(2)
def test_a_model_on_the_meta_device_is_compared_with_no_more_than_a_layer_unsharded() -> None:
    Block.alive = 0
    verdict = verify(on_meta, with_values, wide_batch, loss, aligned_seeds=True)
    assert verdict.equal, str(verdict)
    assert "layer by layer on rank 0 (cpu): 12 layers" in verdict.notes[0]
    assert "gradients of scale" in verdict.notes[1]
    assert Block.alive <= 5, Block.alive  # of 12: values, gradients, what is just gathered
    assert Block.alive >= 1 or dist.get_rank() > 0


@pytest.mark.parametrize("reentrant", [False, True])
@distributed(2)
def test_layers_that_are_recomputed_with_dropout_raise_no_alarm(reentrant: bool) -> None:
    verdict = verify(
        lambda: on_meta(depth=2, recomputed=reentrant),
        with_values,
        wide_batch,
        loss,
        aligned_seeds=True,
    )
    assert verdict.equal, str(verdict)
    assert verdict.largest is not None


@distributed(2)
def test_without_room_for_the_whole_model_it_goes_layer_by_layer_and_says_so() -> None:
    with mock.patch.object(room, "free_memory", return_value=1200):
        verdict = verdict_of(layers=None)
    assert verdict.equal
    assert "layer by layer" in str(verdict)
    with (
        mock.patch.object(room, "free_memory", return_value=1200),
        pytest.raises((MemoryError, RuntimeError), match="the unsharded model takes"),
    ):
        verdict_of(layers=False)


def tied() -> Any:
    """One weight of two layers, which one of them uses by a function of the model too."""
    model = Assembled(
        lambda m, x: m.down(m.up(x)) @ m.other.weight + m.other(x),
        up=nn.Linear(6, 6, bias=False),
        down=nn.Linear(6, 6, bias=False),
        other=nn.Linear(6, 6),
    )
    model.down.weight = model.up.weight
    return model


@distributed(2)
def test_gradients_of_tied_weights_add_up_and_those_used_between_layers_are_left_out() -> None:
    def one_group(model: Any) -> None:
        fully_shard(model)

    verdict = verdict_of(build_model=tied, shard=one_group)
    assert verdict.equal, str(verdict)


@distributed(2)
def test_the_user_may_choose_the_layers() -> None:
    verdict = verdict_of(layers=lambda model: [model.down, model.up])
    assert verdict.equal
    assert "2 layers" in verdict.notes[0]
    with pytest.raises((ValueError, RuntimeError), match="layers returned"):
        verdict_of(layers=lambda model: [model])
    with pytest.raises(TypeError, match="layers is a int"):
        verdict_of(layers=3)


def test_layers_are_the_elements_of_lists_and_what_stands_beside_them() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(2, 2)
    model.inner = nn.Module()
    model.inner.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.inner.norm = nn.LayerNorm(2)
    assert layer_names(model) == ["embed", "inner.blocks.0", "inner.blocks.1", "inner.norm"]
    assert layer_names(build()) == ["up", "between", "down"]
