"""The forward order: compared between ranks in the first iteration, and with it later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.fsdp1_fronts import OURS, hybrid_mesh, loss_of, rows
from support.modules import Stack
from support.ranks import distributed
from support.surface.model import Block


class Ordered(Stack):
    """Blocks that run in the order in which they are asked for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        stem = nn.Linear(6, 6)
        super().__init__([Block() for _ in range(3)], stem=stem)

    def forward(self, x: torch.Tensor, order: Iterable[int] = range(3)) -> torch.Tensor:
        x = self.stem(x)
        for index in order:
            x = self.blocks[index](x)
        return x


@contextmanager
def _checking() -> Iterator[None]:
    """As under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


def _step(model: Any, order: list[int]) -> None:
    loss_of(model(rows(0), order)).backward()


BLOCK = r"blocks.{0}.scale, blocks.{0}.fc1.weight, blocks.{0}.fc1.bias"


@distributed(2, 4, matrix=[4])
def test_ranks_that_differ_in_the_first_iteration_raise_on_all_and_name_parameters() -> None:
    with _checking():
        model = OURS.wrapped(Ordered())
        with pytest.raises(RuntimeError, match="the forward order differs across ranks") as error:
            _step(model, [0, 1, 2] if dist.get_rank() == 0 else [0, 2, 1])
        text = str(error.value)
        assert re.search(rf"rank 0 is at the gather of {BLOCK.format(1)}", text)
        assert re.search(rf"rank 1 is at the gather of {BLOCK.format(2)}", text)
        model.module.reset_iter_state()
        _step(model, [0, 1, 2])


@distributed(2, 4, matrix=[4])
def test_a_rank_that_ends_its_forward_early_raises_on_all() -> None:
    with _checking():
        model = OURS.wrapped(Ordered())
        with pytest.raises(RuntimeError, match=r"rank 1 is at the end of the forward"):
            _step(model, [0, 1] if dist.get_rank() == 0 else [0])


@distributed(2, 4)
def test_replicas_are_compared_as_well() -> None:
    mesh, half = hybrid_mesh(), dist.get_world_size() // 2
    with _checking():
        model = OURS.wrapped(Ordered(), sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
        with pytest.raises(RuntimeError, match=rf"rank {half} is at the gather of blocks.0"):
            _step(model, [1] if dist.get_rank() < half else [0])


@pytest.mark.parametrize("later", [[0, 2, 1], [0, 1], [0, 1, 2, 2]])
@distributed(2, 4, matrix=[4])
def test_another_order_than_in_the_first_iteration_warns_once_and_names_parameters(
    later: list[int],
) -> None:
    expected = {2: "end of the forward", 4: f"expected the end.*gather of {BLOCK.format(2)}"}
    match = expected.get(len(later), rf"expected the gather of {BLOCK.format(1)}")
    with _checking():
        model = OURS.wrapped(Ordered())
        _step(model, [0, 1, 2])
        _step(model, [0, 1, 2])
        model.eval()
        with torch.no_grad():
            model(rows(0), [2])
        model.train()
        with pytest.warns(UserWarning, match=match) as caught:
            _step(model, later)
        assert len(caught) == 1
        _step(model, [2, 1, 0])


@distributed(2, 4, matrix=[4])
def test_nothing_is_compared_unless_torch_was_asked_to_check_all() -> None:
    model = OURS.wrapped(Ordered())
    for order in ([0, 1, 2], [2, 1, 0]):
        _step(model, order)


@distributed(2, 4, matrix=[4])
def test_a_recomputed_forward_does_not_count() -> None:
    from torch.utils.checkpoint import checkpoint

    class Recomputed(Ordered):
        def forward(self, x: torch.Tensor, order: Iterable[int] = range(3)) -> torch.Tensor:
            for index in order:
                x = checkpoint(self.blocks[index], x, use_reentrant=False)
            return x

    with _checking():
        model = OURS.wrapped(Recomputed())
        for _ in range(3):
            _step(model, [0, 1, 2])
