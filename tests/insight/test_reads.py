"""``set_gather_on_read``: what it refuses, and for which modules it is on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.insight import set_gather_on_read
from fullshard.sharding import fully_shard
from support.ranks import distributed


class Keeping(nn.Module):
    """Keeps what it computes, and returns none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.down(torch.relu(self.up(x)))
        return x


def _sharded() -> Any:
    model = nn.Sequential(Keeping(), Keeping())
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _backward(model: Any, index: int) -> None:
    model(torch.ones(2, 4))
    model[index].kept.sum().backward()


@pytest.mark.parametrize(
    ("given", "words"),
    [({"gather_on_read": 1}, "gather_on_read is"), ({"recurse": "yes"}, "recurse is")],
)
@distributed(2)
def test_it_takes_bools_only(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        set_gather_on_read(_sharded(), **{"gather_on_read": True, **given})


def test_a_module_that_is_not_sharded_is_an_error() -> None:
    with pytest.raises(ValueError, match="Linear is not sharded; call fully_shard first"):
        set_gather_on_read(nn.Linear(2, 2), True)


@distributed(2)
def test_it_holds_for_the_modules_that_it_was_set_for_until_it_is_turned_off() -> None:
    model = _sharded()
    set_gather_on_read(model[1], True)
    _backward(model, 1)
    assert all(param.grad is not None for param in model[1].parameters())
    with pytest.raises(RuntimeError, match="is at version 1000000000"):
        _backward(model, 0)
    model.reset_iter_state()
    set_gather_on_read(model, True)
    _backward(model, 0)
    set_gather_on_read(model, False)
    with pytest.raises(RuntimeError, match="is at version 1000000000"):
        _backward(model, 1)
