"""What ranks say of themselves, compared across ranks: errors, values of sharded models."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import EventKind, EventLog
from support.parity.compare import full


def everyone(value: Any) -> list[Any]:
    """What each rank gave, by rank; also shows that the ranks are still in step."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def full_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """The whole value of every parameter."""
    return {name: full(param) for name, param in module.named_parameters()}


def assert_equal_state(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Both hold the same keys in the same order, and bit-equal whole tensors under them."""
    assert list(left) == list(right)
    for name in left:
        one, other = full(left[name]), full(right[name])
        assert one.dtype is other.dtype, name
        assert torch.equal(one, other), name


def never_gathered(log: EventLog) -> bool:
    """Whether no gather of parameters was issued while ``log`` listened."""
    return not log.of(EventKind.UNSHARD, EventKind.ALL_GATHER)
