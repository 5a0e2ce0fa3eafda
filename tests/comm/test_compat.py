"""The same calls on every torch that is supported."""

from __future__ import annotations

import importlib
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fullshard.comm.runtime import compat
from support.ranks import distributed, world


@distributed(2)
def test_the_newest_names_are_used_so_that_nothing_warns() -> None:
    group = world()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = torch.zeros(2)
        compat.gather_into(output, torch.full((1,), 1.0 + group.rank()), group, False)
        reduced = torch.zeros(1)
        compat.reduce_scatter_into(reduced, torch.ones(2), group, dist.ReduceOp.SUM, False)
    assert output.tolist() == [1.0, 2.0]
    assert reduced.tolist() == [2.0]


class _Older:
    """A process group with the older names only."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def _allgather_base(self, *args: object) -> None:
        self.called.append("gather")

    def _reduce_scatter_base(self, *args: object) -> None:
        self.called.append("reduce")


def test_a_torch_with_the_older_names_only_is_served_by_them() -> None:
    older: Any = _Older()
    data = torch.zeros(1)
    try:
        with patch.object(dist, "ProcessGroup", _Older):
            again = importlib.reload(compat)
            again.gather_into(data, data, older, False)
            again.reduce_scatter_into(data, data, older, dist.ReduceOp.SUM, False)
    finally:
        importlib.reload(compat)
    assert older.called == ["gather", "reduce"]


def test_a_torch_with_neither_name_is_refused_at_import() -> None:
    try:
        with (
            patch.object(dist, "ProcessGroup", object),
            pytest.raises(ImportError, match="all_gather_single"),
        ):
            importlib.reload(compat)
    finally:
        importlib.reload(compat)


def test_lists_without_tensors_are_copied_zeroed_and_scaled_in_no_launch() -> None:
    compat.foreach_copy([], [])
    compat.foreach_zero([])
    compat.foreach_scale([], 2.0)
    first, second = torch.ones(2), torch.ones(3)
    compat.foreach_scale([first, second], 3.0)
    compat.foreach_zero([second])
    assert (first.tolist(), second.tolist()) == ([3.0, 3.0], [0.0, 0.0, 0.0])
    compat.foreach_copy([first], [torch.tensor([1, 2])])
    assert first.tolist() == [1.0, 2.0]
