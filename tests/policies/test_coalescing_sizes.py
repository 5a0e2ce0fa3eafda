"""When small collectives had better be one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import (
    DefaultAllGather,
    GatherConfig,
    Layout,
    ProcessGroupTransport,
    TensorSpec,
)
from fullshard.policies.schedules.sizes import alike, default_cap, pays
from fullshard.samehost import automatic
from support.apart import private_memory
from support.collectives import gather_config
from support.ranks import distributed, new_group, world


def make_config(comm: Any = None) -> GatherConfig:
    comm = DefaultAllGather(transport=automatic.AutomaticTransport()) if comm is None else comm
    return gather_config(world(), comm)


def layout(slice_nbytes: int, ranks: int) -> Layout:
    return Layout([TensorSpec(shape=(ranks, slice_nbytes // 4), dtype=torch.float32)], ranks)


class OwnAllGather(DefaultAllGather):
    """A user's, which allocates by itself."""

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().allocate(*args, **kwargs)


class OwnAllocator:
    """A user's."""

    empty = staticmethod(torch.zeros)


@distributed(2, 4)
def test_what_counts_is_one_ranks_slice() -> None:
    ranks = dist.get_world_size()
    with patch.object(automatic, "same_host_transport", lambda group: automatic._ALL_TO_ALL):
        assert pays(layout(64 << 10, ranks), make_config())
        assert not pays(layout((64 << 10) + 16, ranks), make_config())
        assert not pays(layout(0, ranks), make_config())


@distributed(2)
def test_ranks_that_share_memory_and_collectives_with_a_say_have_their_own_launches() -> None:
    small, transport = layout(16, 2), automatic.AutomaticTransport()
    assert not pays(small, make_config())
    with patch.object(automatic, "same_host_transport", lambda group: automatic._ALL_TO_ALL):
        assert pays(small, make_config())
        for comm in (
            DefaultAllGather(transport=ProcessGroupTransport()),
            DefaultAllGather(transport=transport, allocator=OwnAllocator()),
        ):
            assert not pays(small, make_config(comm))
    with private_memory():
        assert pays(small, make_config())


@distributed(2)
def test_configs_coalesce_that_differ_in_their_names_only() -> None:
    one, transport = make_config(), automatic.AutomaticTransport()
    assert alike(one, replace(one, name="b", comm=DefaultAllGather(transport=transport)))
    assert not alike(one, make_config())  # other streams
    assert not alike(one, replace(one, comm=DefaultAllGather()))
    assert not alike(one, replace(one, comm=OwnAllGather(transport=transport)))
    group = new_group()
    assert not alike(one, replace(one, process_group=group))
    dist.destroy_process_group(group)


@pytest.mark.parametrize(("ranks", "mib"), [(1, 0.5), (2, 1.0), (8, 4.0), (50, 25.0), (1024, 25.0)])
def test_a_shared_launch_moves_half_a_mebibyte_of_each_rank_and_25_at_most(
    ranks: int, mib: float
) -> None:
    assert default_cap(ranks) == mib * 2**20
