"""Which ranks are on one host: the arithmetic, and what ranks must agree on."""

from __future__ import annotations

import socket
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fullshard.comm import AllGather, DefaultAllGather, default_all_gather
from fullshard.sharding import RankMismatchError, fully_shard
from fullshard.wire import ErrorFeedback, Quantised, WirePolicy
from fullshard.wire.hosts import Grid, grid_of, levels_of
from support.ranks import cpu_mesh, distributed, run_on_ranks, world
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads

# -- arithmetic -----------------------------------------------------------------------------------


@given(st.integers(2, 6), st.integers(2, 6), st.booleans())
def test_each_rank_has_a_host_and_a_place(hosts: int, per_host: int, in_turns: bool) -> None:
    ranks = range(hosts * per_host)
    grid = grid_of([rank % hosts if in_turns else rank // per_host for rank in ranks])
    assert grid is not None
    assert (grid.hosts, grid.per_host, grid.is_in_order) == (hosts, per_host, not in_turns)
    for rank in ranks:
        host, place = grid.host(rank), grid.place(rank)
        assert grid.inside(host)[place] == grid.between(place)[host] == rank


@pytest.mark.parametrize("hosts", [["a"], ["a", "a", "a"], ["a", "b", "c"]])
def test_one_host_and_one_rank_on_each_have_no_levels(hosts: list[str]) -> None:
    assert grid_of(hosts) is None


def test_ranks_are_in_the_order_of_the_world_whatever_the_groups() -> None:
    assert grid_of(["b", "a", "b", "a"], [3, 1, 2, 0]) == Grid(2, 2, (3, 1, 2, 0))


def test_hosts_of_different_sizes_are_an_error_that_names_them() -> None:
    with pytest.raises(ValueError, match=r"different numbers of the 3 .*a: \[0, 1\], b: \[2\]"):
        grid_of(["a", "a", "b"])


def test_places_that_come_in_another_order_of_hosts_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"one order of hosts: a: \[0, 3\], b: \[1, 2\]"):
        grid_of(["a", "b", "b", "a"])


# -- the option -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [0, -1, "name", ""])
def test_a_number_below_one_or_another_word_is_an_error(hosts: Any) -> None:
    with pytest.raises(ValueError, match=r"hosts is .*LOCAL_WORLD_SIZE"):
        WirePolicy(hosts=hosts)


@pytest.mark.parametrize("hosts", [True, 1.5, ("a", "b")])
def test_another_type_is_an_error(hosts: Any) -> None:
    with pytest.raises(TypeError, match="pass how many ranks each host has"):
        WirePolicy(hosts=hosts)


def test_error_feedback_of_what_hosts_send_is_an_error() -> None:
    form = Quantised(torch.int8, feedback=ErrorFeedback())
    for forms in ({"reductions": form}, {"reduction_rules": {"head.*": form}}):
        with pytest.raises(ValueError, match=r"by hosts=2.*leave one of the two away"):
            WirePolicy(hosts=2, **forms)


def _transport(comm: AllGather) -> object:
    assert isinstance(comm, DefaultAllGather)
    return comm.transport


def test_what_gains_nothing_is_served_as_without_it() -> None:
    def body(rank: ThreadRank) -> None:
        default = _transport(default_all_gather(world()))
        for hosts in (1, 4, 8):
            assert _transport(WirePolicy(hosts=hosts).all_gather(world())) == default
            assert levels_of(world(), hosts) is None
        assert _transport(WirePolicy(hosts=2).all_gather(world())) != default
        alone = dist.new_group([rank.rank], use_local_synchronization=True)
        assert isinstance(alone, dist.ProcessGroup)
        gather = WirePolicy(hosts="names").all_gather(alone)
        assert _transport(gather) == _transport(default_all_gather(alone))

    run_program_on_threads(body, 4)


# -- agreement ------------------------------------------------------------------------------------


def _error(hosts: Any, name: str = "") -> str:
    with patch.object(socket, "gethostname", lambda: name or "here"):
        try:
            levels_of(world(), hosts)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_were_told_different_things_all_raise() -> None:
    def body(rank: ThreadRank) -> str:
        return _error(2 if rank.rank else "names")

    for said in run_program_on_threads(body, 4):
        assert said.startswith("ValueError: ranks disagree on WirePolicy(hosts=...): rank 0: 'nam")
        assert "rank 3: 2; give all ranks the same" in said


def test_a_rank_that_was_told_nothing_raises_with_the_others_before_anything_travels() -> None:
    def body(rank: ThreadRank) -> str:
        model = torch.nn.Linear(4, 4)
        fully_shard(model, wire_policy=WirePolicy(hosts=None if rank.rank == 2 else 2))
        with pytest.raises(RankMismatchError) as differs:
            model(torch.ones(1, 4))
        return str(differs.value)

    for said in run_program_on_threads(body, 4):
        assert "hosts: 2" in said
        assert "hosts: None" in said


def test_hosts_of_different_sizes_by_name_are_an_error_on_all_ranks() -> None:
    def body() -> str:
        return _error("names", "small" if dist.get_rank() == 3 else "large")

    for said in run_on_ranks(body, 4):
        assert "large: [0, 1, 2], small: [3]" in said


def test_hosts_of_different_sizes_by_number_are_an_error_before_anything_is_sharded() -> None:
    def body(rank: ThreadRank) -> bool:
        model = torch.nn.Linear(4, 4)
        with pytest.raises(ValueError, match=r"host 0: \[0, 1, 2, 3\], host 1: \[4, 5\]"):
            fully_shard(model, wire_policy=WirePolicy(hosts=4))
        return type(model.weight) is torch.nn.Parameter

    assert all(run_program_on_threads(body, 6))


def test_ranks_in_different_numbers_of_process_groups_all_raise() -> None:
    def body(rank: ThreadRank) -> str:
        if rank.rank == 1:
            dist.new_group([1], use_local_synchronization=True)
        return _error(2)

    for said in run_program_on_threads(body, 4):
        assert said.startswith("RuntimeError: ranks disagree on how many process groups")


@distributed(4)
def test_ranks_make_the_groups_of_a_host_and_of_a_place_once(world_size: int) -> None:
    group = cpu_mesh((1, world_size), ("once", "all")).get_group("all")
    levels = levels_of(group, 2)
    assert levels is not None
    host, place = divmod(dist.get_rank(), 2)
    for level in (levels.gathers, levels.reductions):
        assert dist.get_process_group_ranks(level.inside) == [2 * host, 2 * host + 1]
        assert dist.get_process_group_ranks(level.between) == [place, 2 + place]
    assert levels_of(group, 2) is levels


def test_no_rank_beyond_the_process_group_is_waited_for() -> None:
    """Ranks 4 and 5 have ended when the others make their groups."""

    def body(rank: ThreadRank) -> None:
        group = dist.new_group([0, 1, 2, 3])
        if rank.rank < 4:
            assert isinstance(group, dist.ProcessGroup)
            assert levels_of(group, 2) is not None

    run_program_on_threads(body, 6)
