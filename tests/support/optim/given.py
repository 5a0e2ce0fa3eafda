"""Steps on given gradients, of the unsharded model and of ranks that shard it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from support.optim.ways import Way, full_state, full_values, give
from support.threads.ranks import run_on_threads
from support.threads.world import run_program_on_threads

Result = tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]
"""The whole parameters, and the whole state of each."""


@dataclass(frozen=True, kw_only=True)
class GivenSteps:
    """An optimizer's steps on gradients that are given.

    Attributes:
        module: makes the module, in a dtype.
        gradients: the whole gradients of a step, in a dtype.
        make: makes the optimizer of a module; further options by name.
        count: how many steps.
    """

    module: Callable[[torch.dtype], nn.Module]
    gradients: Callable[[int, torch.dtype], dict[str, torch.Tensor]]
    make: Callable[..., torch.optim.Optimizer]
    count: int

    def run(self, way: Way | None, dtype: torch.dtype = torch.float32, **options: Any) -> Result:
        """What this rank's steps leave; ``way``: None: the module is not sharded."""
        model = self.module(dtype)
        if way is not None:
            way.apply(model)
        optimizer = self.make(model, **options)
        for step in range(self.count):
            give(model, self.gradients(step, dtype), way)
            optimizer.step()
        return full_values(model), full_state(model, optimizer)

    def whole(self, dtype: torch.dtype = torch.float32, **options: Any) -> Result:
        """What steps of the unsharded module leave."""
        return run_on_threads(lambda rank: self.run(None, dtype, **options), 1)[0]

    def by_ranks(
        self, way: Way, dtype: torch.dtype = torch.float32, **options: Any
    ) -> list[Result]:
        """What steps of ranks that shard it leave on each of them."""
        return run_program_on_threads(lambda rank: self.run(way, dtype, **options), way.world_size)

    def assert_the_same(
        self, way: Way, dtype: torch.dtype = torch.float32, **options: Any
    ) -> Result:
        """Every rank has, bit for bit, what the unsharded module has; returns that."""
        expected = self.whole(dtype, **options)
        for values, state in self.by_ranks(way, dtype, **options):
            assert_same(state, expected[1])
            assert_same(values, expected[0])
        return expected


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any], name: str = "") -> None:
    """Both have the same names, and the same bits under each."""
    assert found.keys() == expected.keys(), name
    for key, value in expected.items():
        if isinstance(value, Mapping):
            assert_same(found[key], value, f"{name}.{key}")
        else:
            assert torch.equal(found[key], value), f"{name}.{key}"
