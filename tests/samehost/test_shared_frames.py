"""Shared buffers that take turns in the same pages: who reads what, and what memory there is."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard.insight import debug_mode
from fullshard.samehost import (
    SharedMemoryStatistics,
    SharedMemoryTransport,
    set_shared_frames,
    shared_memory_statistics,
)
from fullshard.samehost.frames import release_frames
from fullshard.samehost.group import SharedBuffer, SharedWork
from fullshard.samehost.pages import Shown
from support.ranks import distributed

PAGE = 4096


@contextmanager
def new_group() -> Iterator[dist.ProcessGroup]:
    """A process group whose ranks share nothing yet."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    yield group
    gc.collect()
    dist.destroy_process_group(group)


def opened(group: dist.ProcessGroup, count: int, nbytes: int = PAGE) -> list[SharedBuffer]:
    """Shared buffers, each opened once those before it were gathered and left."""
    buffers = []
    for number in range(count):
        buffers.append(SharedMemoryTransport().open_shared_buffer(group, nbytes))
        fill(buffers[-1], number).wait()
        buffers[-1].leave()
    return buffers


def fill(buffer: SharedBuffer, value: int) -> SharedWork:
    """A gather, after which all is ``value``."""
    rank, half = dist.get_rank(), buffer.memory.numel() // 2

    def write() -> None:
        buffer.memory[rank * half :][:half] = value

    return buffer.gather(write)


def holds(buffer: SharedBuffer, value: int) -> bool:
    return bool((buffer.memory == value).all())


def shared_pages() -> int:
    """Bytes of segments that this process maps, of those that others map too its part."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0]:
            ours = "memfd:fullshard" in line
        elif ours and fields[0] == "Pss:":
            total += int(fields[1]) * 1024
    return total


@distributed(2)
def test_shared_buffers_that_are_used_one_after_another_lie_in_the_pages_of_two() -> None:
    with new_group() as group:
        gc.collect()
        before = shared_pages()
        buffers = opened(group, 12, 64 * PAGE)
        dist.barrier()
        assert shared_memory_statistics(group) == SharedMemoryStatistics(
            buffers=12, buffer_bytes=12 * 64 * PAGE, frames=2, frame_bytes=2 * 64 * PAGE
        )
        assert 0 < shared_pages() - before <= 2 * 64 * PAGE // 2  # rounded for each mapping
        assert len({buffer.memory.data_ptr() for buffer in buffers}) == 12
        dist.barrier()
        for turn in range(20, 23):
            for buffer in (*buffers, *reversed(buffers)):
                fill(buffer, turn).wait()
                assert holds(buffer, turn)
                buffer.leave()
        del buffers, buffer
        gc.collect()
        assert shared_memory_statistics(group).frame_bytes == 0
        assert shared_pages() <= before


@distributed(2)
def test_what_is_in_use_when_others_are_opened_has_pages_of_its_own() -> None:
    with new_group() as group:
        held = [SharedMemoryTransport().open_shared_buffer(group, PAGE) for _ in range(2)]
        for buffer in held:
            fill(buffer, 100).wait()
        others = opened(group, 6)
        assert shared_memory_statistics(group).frames == 2 + 2
        for number, buffer in enumerate(others):
            fill(buffer, number).wait()
            buffer.leave()
        assert all(holds(buffer, 100) for buffer in held)
        assert shared_memory_statistics(group).moved_out == 0
        del held, others, buffer


@pytest.mark.parametrize("waited", [True, False])
@distributed(2)
def test_what_a_rank_still_uses_stays_where_it_is_when_its_pages_are_wanted(waited: bool) -> None:
    with new_group() as group:
        first, _, last = opened(group, 3)  # with two frames these two have one
        aliases = first.memory[:5]
        for turn in (50, 60):
            work = fill(first, turn)
            if waited:
                work.wait()
            if dist.get_rank() == 1:
                work.wait()
                first.leave()
            fill(last, turn + 1).wait()
            assert holds(last, turn + 1)
            work.wait()
            if dist.get_rank() == 0:
                assert holds(first, turn)
                assert aliases.tolist() == [turn] * 5
                first.leave()
            last.leave()
        moved = shared_memory_statistics(group).moved_out
        assert moved == (2 if dist.get_rank() == 0 else 0)
        assert first.window.shown is Shown.FILE, "private pages are given back"
        del first, last, aliases, work, _


@distributed(2)
def test_memory_that_outlives_its_shared_buffer_is_not_written_over() -> None:
    with new_group() as group:
        first, *others = opened(group, 3)
        fill(first, 50).wait()
        alias = first.memory[:5]
        del first
        gc.collect()
        fill(others[-1], 60).wait()
        assert alias.tolist() == [50] * 5
        assert holds(others[-1], 60)
        del alias
        gc.collect()
        assert shared_memory_statistics(group).buffers == 2
        del others


@distributed(2)
def test_a_shared_buffer_that_died_in_use_on_one_rank_keeps_nobody_waiting() -> None:
    with new_group() as group:
        first, *others = opened(group, 3)
        fill(first, 50).wait()
        if dist.get_rank() == 1:
            first.leave()
        del first
        gc.collect()
        fill(others[-1], 60).wait()
        assert holds(others[-1], 60)
        del others


@distributed(2)
def test_frames_that_died_on_one_rank_only_serve_again() -> None:
    with new_group() as group:
        buffers = opened(group, 2)
        fill(buffers[0], 50).wait()
        if dist.get_rank() == 1:  # has none of them now, nor said that it left the first
            buffers.clear()
            gc.collect()
        dist.barrier()
        if dist.get_rank() == 0:
            buffers[0].leave()
        again = opened(group, 2)
        for number, buffer in enumerate(again):
            fill(buffer, number + 70).wait()
            assert holds(buffer, number + 70)
        del buffers, again, buffer


@distributed(2)
def test_full_parameters_may_all_stay() -> None:
    with new_group() as group:
        set_shared_frames(None)
        try:
            buffers = opened(group, 5)
        finally:
            set_shared_frames()
        assert shared_memory_statistics(group).frames == 5
        for turn, buffer in enumerate(buffers):
            assert holds(buffer, turn)
        del buffers, buffer


@contextmanager
def kept(nbytes: int | None) -> Iterator[None]:
    """A context in which frames of up to so many bytes stay between steps."""
    set_shared_frames(kept=nbytes)
    try:
        yield
    finally:
        set_shared_frames()


def frame_bytes(group: dist.ProcessGroup) -> int:
    """Bytes that frames take once every rank has ended its step."""
    release_frames()
    dist.barrier()
    found = shared_memory_statistics(group).frame_bytes
    dist.barrier()  # before a rank goes on to use them
    return found


@pytest.mark.parametrize(("nbytes", "stays"), [(5 * PAGE, True), (5 * PAGE - 1, False)])
@distributed(2)
def test_frames_are_given_back_between_steps_where_one_is_larger_than_what_is_kept(
    nbytes: int, stays: bool
) -> None:
    with new_group() as group, kept(nbytes):
        buffers = [*opened(group, 2), *opened(group, 2, 5 * PAGE)]
        assert frame_bytes(group) == (10 * PAGE if stays else 0)
        for turn in range(2):
            for number, buffer in enumerate(buffers):
                fill(buffer, 10 * turn + number).wait()
                assert holds(buffer, 10 * turn + number)
                buffer.leave()
            assert frame_bytes(group) == (10 * PAGE if stays else 0)
        del buffers, buffer


@distributed(2)
def test_no_frame_is_given_back_while_a_rank_uses_it() -> None:
    with new_group() as group, kept(0):
        first, second = opened(group, 2)
        for slow in (0, 1):
            fill(first, 40).wait()
            fill(second, 41).wait()
            if dist.get_rank() != slow:
                first.leave()
            second.leave()
            assert frame_bytes(group) == PAGE
            assert dist.get_rank() != slow or holds(first, 40)
            first.leave()
            assert frame_bytes(group) == 0
        del first, second


@distributed(2)
def test_a_frame_in_which_a_rank_gathers_already_is_not_given_back() -> None:
    with new_group() as group, kept(0):
        first, _ = opened(group, 2)
        if dist.get_rank() == 0:
            release_frames()
            work = fill(first, 60)  # of the next step
        dist.barrier()
        if dist.get_rank() == 1:
            release_frames()
            work = fill(first, 60)
        work.wait()
        assert holds(first, 60)
        first.leave()
        del first, _, work


@distributed(2)
def test_a_rank_that_ends_gives_its_frames_free() -> None:
    with new_group() as group, kept(0):
        buffers = opened(group, 2)
        frames = [buffer.frame for buffer in buffers]
        if dist.get_rank() == 1:
            for frame in frames:
                os.close(os.dup(frame.file.fd))  # as a forked child does: it ends no lock
            del frames, frame
            buffers.clear()
            gc.collect()
        dist.barrier()
        if dist.get_rank() == 0:
            release_frames()
            assert shared_memory_statistics(group).frame_bytes == 0
            del frames
        dist.barrier()
        buffers.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@distributed(2)
def test_in_debug_mode_a_buffer_that_was_left_reads_as_no_number(dtype: torch.dtype) -> None:
    with new_group() as group, debug_mode():
        first, _, last = opened(group, 3)  # with two frames these two have one
        alias = first.memory.view(dtype)
        for turn in (20, 30):
            fill(first, turn).wait()
            assert not alias.float().isnan().any()
            first.leave()
            assert alias.float().isnan().all()
            fill(last, turn + 1).wait()
            assert alias.float().isnan().all()
            alias.zero_()  # changes nothing that others see
            assert holds(last, turn + 1)
            last.leave()
        del first, last, alias, _


def test_the_number_of_frames_is_checked() -> None:
    with pytest.raises(ValueError, match="count is 0; at least 1"):
        set_shared_frames(0)
    with pytest.raises(TypeError, match="count is True, a bool"):
        set_shared_frames(True)
    with pytest.raises(ValueError, match="kept is -1; pass a number of bytes from 0 on"):
        set_shared_frames(kept=-1)


@distributed(2)
def test_ranks_that_share_nothing_say_so() -> None:
    with new_group() as group:
        assert shared_memory_statistics(group) == SharedMemoryStatistics()
