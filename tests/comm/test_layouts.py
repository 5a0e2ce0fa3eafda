"""Which tensors are direct: a table that is data, and a measurement that all ranks share."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from comm.stand_ins import CPU
from fullshard.comm import (
    DirectFrom,
    LayoutTable,
    TensorSpec,
    direct_gathers,
    direct_reductions,
    fit_layouts,
    layout_table,
    set_layout_table,
    set_shared_memory,
)
from support.ranks import distributed

SPECS = [
    TensorSpec(shape=(8, 4), dtype=torch.float32),  # 128 bytes
    TensorSpec(shape=(64, 4), dtype=torch.float32),  # 1024
    TensorSpec(shape=(64, 4), dtype=torch.float32, dim=1),  # not eligible
]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


@pytest.fixture(autouse=True)
def committed() -> Iterator[None]:
    yield
    set_layout_table(None)


@distributed(2)
def test_thresholds_choose_among_those_that_are_eligible() -> None:
    def chosen(gather: int | None, reduce: int | None) -> tuple[object, object]:
        set_layout_table(LayoutTable({"gloo/cpu": DirectFrom(gather=gather, reduce=reduce)}))
        both = direct_gathers(SPECS, world(), CPU), direct_reductions(SPECS, world(), CPU)
        set_layout_table(None)
        return both

    assert chosen(0, None) == ((0, 1), ())
    assert chosen(1024, 0) == ((1,), (0, 1))
    assert chosen(1025, 1024) == ((), (1,))


@distributed(2)
def test_what_a_table_does_not_name_is_never_direct() -> None:
    set_layout_table(LayoutTable({"nccl/cuda": DirectFrom(gather=0, reduce=0)}))
    assert direct_gathers(SPECS, world(), CPU) == direct_reductions(SPECS, world(), CPU) == ()
    set_layout_table(None)


@distributed(1)
def test_one_rank_alone_has_none() -> None:
    set_layout_table(LayoutTable({"gloo/cpu": DirectFrom(gather=0, reduce=0)}))
    assert direct_gathers(SPECS, world(), CPU) == ()
    set_layout_table(None)


def test_the_committed_table_has_a_row_for_gpus_and_never_uses_it() -> None:
    assert layout_table().rows["nccl/cuda"] == DirectFrom(gather=None, reduce=None)


def test_a_table_travels_as_plain_numbers() -> None:
    table = LayoutTable({"gloo/cpu": DirectFrom(gather=4096), "nccl/cuda": DirectFrom(reduce=0)})
    state = json.loads(json.dumps(table.state_dict()))
    assert state == {"gloo/cpu": [4096, -1], "nccl/cuda": [-1, 0]}
    assert LayoutTable.from_state_dict(state) == table


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match="gather=-5"):
        DirectFrom(gather=-5)
    with pytest.raises(ValueError, match="two numbers"):
        LayoutTable.from_state_dict({"gloo/cpu": [1]})
    with pytest.raises(TypeError, match="'gloo/cpu': 5"):
        LayoutTable({"gloo/cpu": 5})  # type: ignore[dict-item]  # what is refused
    with pytest.raises(TypeError, match="dict"):
        set_layout_table({})  # type: ignore[arg-type]  # what is refused


@distributed(2)
def test_a_fit_gives_every_rank_the_same_table_and_changes_nothing_itself() -> None:
    set_shared_memory(False)
    try:
        table = fit_layouts(world(), CPU, sizes=[1 << 14, 1 << 16], repeats=2)
    finally:
        set_shared_memory(True)
    states: list[object] = [None] * world().size()
    dist.all_gather_object(states, table.state_dict())
    assert states[0] == states[1]
    assert set(table.rows) == set(layout_table().rows)
    assert all(value in (None, 1 << 14, 1 << 16) for value in _values(table.rows["gloo/cpu"]))
    assert table.rows["nccl/cuda"] == layout_table().rows["nccl/cuda"]


def _values(row: DirectFrom) -> tuple[int | None, int | None]:
    return row.gather, row.reduce


@distributed(2)
def test_ranks_that_share_memory_get_the_table_as_it_is() -> None:
    assert fit_layouts(world(), CPU, sizes=[1 << 14], repeats=1) is layout_table()


@distributed(1)
def test_sizes_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="ascending"):
        fit_layouts(world(), CPU, sizes=[4096, 1024])
