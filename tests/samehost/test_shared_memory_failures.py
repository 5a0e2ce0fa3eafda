"""Ranks that share memory when things go wrong: who is told what, who hangs, what is left over."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
import resource
import signal
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from comm.stand_ins import no_larger_files_than
from fullshard.comm import PeerLostError
from fullshard.samehost import SharedMemoryError, SharedMemoryTransport
from fullshard.samehost.group import shared_group
from support.ranks import RanksFailed, distributed, new_group, run_on_ranks

SHARED = SharedMemoryTransport()
SUM = dist.ReduceOp.SUM


def give_up(group: dist.ProcessGroup) -> None:
    """As every rank must in the end: torch counts groups to name the next."""
    dist.destroy_process_group(group)


def gather(group: dist.ProcessGroup, numel: int = 1) -> list[float]:
    """One number per rank: its rank plus one."""
    output = torch.zeros(numel * group.size())
    SHARED.all_gather(output, torch.full((numel,), 1.0 + group.rank()), group, False)
    numbers: list[float] = output[::numel].tolist()
    return numbers


# -- a rank that ends -----------------------------------------------------------------------------


def _killed_before_a_gather() -> None:
    gather(new_group())
    group = new_group()
    gather(group)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gather(group)


def _killed_in_the_middle_of_a_reduction() -> None:
    """It has launched, and written, but not read; the next collective finds it gone."""
    group = new_group()
    world_size = group.size()
    work = SHARED.reduce_scatter(torch.zeros(3), torch.ones(3 * world_size), group, SUM, True)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert work is not None
    work.wait()  # its part is there
    gather(group)


def _killed_before_an_all_reduce() -> None:
    group = new_group()
    for number in range(2):
        if number and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        SHARED.all_reduce(torch.ones(3), SUM, group, False)


def _killed_while_others_wait_for_room() -> None:
    group = new_group()
    if dist.get_rank() == 1:
        gather(group, 100)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(200):
        SHARED.all_gather(torch.zeros(100 * group.size()), torch.zeros(100), group, True)


@pytest.mark.parametrize(
    ("program", "world_size"),
    [
        pytest.param(_killed_before_a_gather, 4, id="before a gather"),
        pytest.param(_killed_in_the_middle_of_a_reduction, 2, id="in a reduction"),
        pytest.param(_killed_before_an_all_reduce, 4, id="before an all-reduce"),
        pytest.param(_killed_while_others_wait_for_room, 2, id="while others wait for room"),
    ],
)
def test_a_killed_rank_is_named_by_all_others_and_nothing_is_left(program, world_size) -> None:  # type: ignore[no-untyped-def]
    before = sorted(Path("/dev/shm").iterdir())
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(program, world_size, fresh=True)
    assert caught.value.exit_codes == {1: -signal.SIGKILL}
    for rank in set(range(world_size)) - {1}:
        text = caught.value.reports[rank].text
        assert re.search(r"PeerLostError: rank 1 (\(process \d+\) )?has ended", text), text
    assert sorted(Path("/dev/shm").iterdir()) == before


def _killed_with_a_child_that_lives_on() -> None:
    """A forked child holds copies of the rank's pipes, so that nobody hears them close."""
    group = new_group()
    gather(group)
    if dist.get_rank() == 1:
        if os.fork() == 0:
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                        os.close(fd)  # the pool's: it must see its rank end
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    gather(group)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this Python cannot watch a process")
def test_a_killed_rank_whose_child_lives_on_is_named_too() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_killed_with_a_child_that_lives_on, 2, fresh=True)
    assert "has ended" in caught.value.reports[0].text


@distributed(4)
def test_a_rank_that_gives_up_its_process_group_is_named() -> None:
    group = new_group()
    gather(group)
    if dist.get_rank() == 2:
        give_up(group)
        del group
        gc.collect()
        dist.barrier()
        return
    dist.barrier()
    with pytest.raises(PeerLostError, match=r"rank 2 \(process \d+\) has ended, or given up"):
        gather(group)
    give_up(group)


@distributed(2)
def test_what_a_rank_wrote_before_it_left_can_still_be_read() -> None:
    group = new_group()
    output = torch.zeros(2)
    work = SHARED.all_gather(output, torch.full((1,), 1.0 + dist.get_rank()), group, True)
    assert work is not None
    if dist.get_rank() == 1:
        work.wait()
        give_up(group)
        del group, work
        gc.collect()
        dist.barrier()
        return
    dist.barrier()
    assert work.is_completed()
    work.wait()
    assert output.tolist() == [1, 2]
    give_up(group)


# -- a rank that is late --------------------------------------------------------------------------


@distributed(2, 4)
def test_a_rank_that_does_not_come_in_the_timeout_is_named_and_told(world_size: int) -> None:
    group = new_group(timeout=timedelta(seconds=1))
    gather(group)
    late = world_size - 1
    if dist.get_rank() == late:
        dist.barrier()  # until the others have given up
        assert gather(group) == [1.0 + rank for rank in range(world_size)]  # it is all there
        with pytest.raises(PeerLostError, match=f"rank {late} did not come in time, says rank 0"):
            gather(group)
    else:
        with pytest.raises(PeerLostError, match=f"rank {late} .*did not come") as caught:
            gather(group)
        assert caught.value.rank == late
        dist.barrier()
    with pytest.raises(SharedMemoryError, match="out of use since: rank"):
        gather(group)


@distributed(2)
def test_a_wait_may_have_a_timeout_of_its_own() -> None:
    group = new_group()
    gather(group)
    if dist.get_rank() == 0:
        work = SHARED.all_gather(torch.zeros(2), torch.zeros(1), group, True)
        assert work is not None
        with pytest.raises(PeerLostError, match=r"for 0\.2 s"):
            work.wait(timedelta(seconds=0.2))
    dist.barrier()


@distributed(2)
def test_an_interrupted_wait_can_be_taken_up_again() -> None:
    group = new_group()
    gather(group)
    if dist.get_rank() == 0:

        def interrupt(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        output = torch.zeros(2)
        work = SHARED.all_gather(output, torch.ones(1), group, True)
        assert work is not None
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                work.wait()
        finally:
            signal.signal(signal.SIGALRM, before)
        dist.barrier()
        work.wait()
        assert output.tolist() == [1, 2]
    else:
        dist.barrier()
        assert gather(group) == [1, 2]


@distributed(2)
def test_a_rank_that_is_interrupted_while_it_launches_tells_the_others() -> None:
    group = new_group()
    gather(group)
    if dist.get_rank() == 0:
        with (
            patch.object(shared_group(group)._segment, "narrow", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            gather(group)
    else:
        with pytest.raises(PeerLostError, match="rank 0 has ended, or was interrupted, says rank"):
            gather(group)
    with pytest.raises(SharedMemoryError, match="out of use since"):
        gather(group)


# -- memory that is not there ---------------------------------------------------------------------


@distributed(2, 4)
def test_a_segment_that_cannot_be_made_is_an_error_on_every_rank_and_a_smaller_still_works() -> (
    None
):
    group = new_group()
    assert gather(group, 100) == [1.0 + rank for rank in range(group.size())]
    capacity = shared_group(group).capacity
    for _ in range(2):
        with (
            no_larger_files_than(2 << 20),
            pytest.raises(SharedMemoryError, match=r"no room for \d+ bytes .*\(rank 0\)"),
        ):
            gather(group, 2_000_000)
        assert shared_group(group).capacity == capacity
        assert gather(group, 100) == [1.0 + rank for rank in range(group.size())]
    assert gather(group, 2_000_000) == [1.0 + rank for rank in range(group.size())]


@distributed(2)
def test_a_segment_that_one_rank_cannot_map_is_an_error_on_every_rank() -> None:
    group = new_group()
    gather(group)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    output, own = torch.zeros(2 * 2_000_000), torch.zeros(2_000_000)
    if dist.get_rank() == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), hard))
    try:
        with pytest.raises(SharedMemoryError, match=r"no room for .*\(rank 1\)"):
            SHARED.all_gather(output, own, group, False)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert gather(group) == [1, 2]


@distributed(2)
def test_a_rank_without_descriptors_left_is_an_error_on_every_rank() -> None:
    group = new_group()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
    try:
        with pytest.raises(SharedMemoryError, match="rank 1 cannot make its pipes"):
            gather(group)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(SharedMemoryError, match="rank 1 cannot make its pipes"):
        gather(group)  # the answer is kept


# -- errors as values -----------------------------------------------------------------------------


def test_the_error_can_be_sent_to_another_process() -> None:
    error = PeerLostError("rank 3 has ended", 3, 6)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.kind) == ("rank 3 has ended", 3, 6)
