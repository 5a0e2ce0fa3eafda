"""Where a watch begins and ends: what it refuses, and what it leaves as it was."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.comm import CommStreams, TensorSpec, all_gather_tensors
from fullshard.comm.runtime.streams import NullStream
from fullshard.preflight.races import RaceError, check, watch_races
from fullshard.sharding import fully_shard

cpu = torch.get_device_module("cpu")


def _step(model: nn.Module) -> None:
    model(torch.randn(2, 8)).sum().backward()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def _sharded(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(nn.Linear(8, 8), mesh=mesh)


def test_a_model_sharded_before_the_watch_is_refused_and_not_called_clean(mesh: Any) -> None:
    model = _sharded(mesh)
    _step(model)
    with pytest.raises(RaceError, match="call fully_shard inside"):
        check(partial(_step, model))
    with watch_races(expect_collectives=False) as report:
        _step(_sharded(mesh))  # another, as it should be
        with pytest.raises(RaceError):
            _step(model)
    assert not report.ok and not report.races and "used before the watch" in str(report)
    model = _sharded(mesh)
    _step(model)  # what was refused leaves nothing behind


def test_a_model_of_a_watch_is_refused_after_it_and_in_another(mesh: Any) -> None:
    with watch_races() as report:
        model = _sharded(mesh)
        _step(model)
    report.raise_if_any()
    with pytest.raises(RuntimeError, match="streams ended"):
        _step(model)
    with pytest.raises(RaceError, match="call fully_shard inside"):
        check(partial(_step, model))


def test_what_shows_nothing_is_not_called_clean() -> None:
    report = check(lambda: torch.ones(2) + 1)
    assert not report.races and not report.ok
    with pytest.raises(RaceError, match="launched no collective"):
        report.raise_if_any()
    assert check(lambda: torch.ones(2) + 1, expect_collectives=False).ok
    with watch_races() as report:
        assert not report.ok and "not come to its end" in str(report)


def test_a_report_says_what_was_seen(mesh: Any) -> None:
    report = check(lambda: _step(_sharded(mesh)))
    assert report.collectives == 2  # a gather, which backward uses too, and a reduction
    seen = f"{sum(report.operations.values())} operations on {len(report.operations)} streams"
    assert f"no races; {seen}" in str(report) and "2 collectives" in str(report)


def test_lists_that_travel_outside_and_inside_have_streams_of_their_own(mesh: Any) -> None:
    def gather() -> list[torch.Tensor]:
        specs = [TensorSpec(shape=(8, 3), dtype=torch.float32)]
        return all_gather_tensors([torch.ones(2, 3)], specs, mesh.get_group())

    gather()
    for _ in range(2):
        check(gather).raise_if_any()
        gather()


def test_streams_are_the_cpus_again_afterwards() -> None:
    before = cpu.Stream, cpu.current_stream, torch.Event, torch.Tensor.tolist
    with watch_races():
        assert not isinstance(CommStreams(torch.device("cpu")).gather, NullStream)
    assert (cpu.Stream, cpu.current_stream, torch.Event, torch.Tensor.tolist) == before
    assert isinstance(CommStreams(torch.device("cpu")).gather, NullStream)
