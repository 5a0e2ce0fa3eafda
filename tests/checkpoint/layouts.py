"""Models whose parameters lie in every way that has to be known, beside the whole values.

And a count of the memory that is taken for parts of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fullshard.sharding import fully_shard
from support import tp_model
from support.ranks import cpu_mesh
from support.surface.model import build
from support.surface.wrappings import WRAPPINGS, Wrapped, hybrid, tied

Full = dict[str, torch.Tensor]


def plain(model: nn.Module) -> Full:
    """The definition: the unsharded model's parameters."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def tensor_parallel(hidden: int) -> tuple[Any, Full]:
    """On four ranks; of 7 features, the parts are uneven."""
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    model = tp_model.parallelize(tp_model.build(hidden), mesh["tp"])
    return tp_model.shard(model, fully_shard, mesh=mesh["dp"]), plain(tp_model.build(hidden))


def experts(dim: int) -> tuple[Any, Full]:
    """On four ranks: stacked experts, what is sharded beside them, and what nobody shards."""
    mesh = cpu_mesh((2, 2), ("dp", "ep"))
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    model.experts = nn.Parameter(torch.randn(4, 6, 5))
    model.own = nn.Parameter(torch.randn(3), requires_grad=False)
    model.empty = nn.Parameter(torch.zeros(0, 3))
    expected = plain(model)
    parts = distribute_tensor(model.experts.detach(), mesh["ep"], [Shard(0)])
    model.experts = nn.Parameter(parts)
    fully_shard(
        model,
        mesh=mesh["dp"],
        ignored_params={model.own},
        shard_placement_fn=lambda param: Shard(dim if param.ndim > 2 else 0),
    )
    return model, expected


def _tied_and_wrapped() -> tuple[Any, Full]:
    torch.manual_seed(0)
    whole = tied()
    expected = plain(whole)
    assert list(expected) == ["factor", "one.weight", "one.bias", "two.bias"]
    return fully_shard(Wrapped(whole)), expected


def _wrapped(way: Callable[[Any], Any]) -> tuple[Any, Full]:
    return way(build()), plain(build())


Layouts = dict[str, Callable[[], tuple[Any, Full]]]
SECOND_CUTS: Layouts = {
    "tensor parallel": partial(tensor_parallel, 8),
    "tensor parallel, uneven": partial(tensor_parallel, 7),
    "experts": partial(experts, 0),
    "experts, rows": partial(experts, 1),
    "tied": _tied_and_wrapped,
}
LAYOUTS: Layouts = {
    **{name: partial(_wrapped, way) for name, way in {**WRAPPINGS, "hybrid": hybrid}.items()},
    **SECOND_CUTS,
}


class Taken:
    """Takes memory, and counts what of it is alive."""

    def __init__(self) -> None:
        self.peak = self.largest = 0
        self._alive: list[tuple[StorageWeakRef, int]] = []

    def __call__(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        taken = torch.empty(shape, dtype=dtype)
        self._alive = [each for each in self._alive if not each[0].expired()]
        self._alive.append((StorageWeakRef(taken.untyped_storage()), taken.nbytes))
        self.largest = max(self.largest, taken.nbytes)
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive))
        return taken
