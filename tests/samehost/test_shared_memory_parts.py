"""What shared memory is made of: regions in a ring, segments, and sums in rank order."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fullshard.comm.runtime.process_watch import host_identity
from fullshard.comm.transports.rank_order import check_reduction, reduce_in_rank_order
from fullshard.samehost.segment import Ring, SegmentFile, aligned, map_segment

# -- the ring -------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_no_two_regions_in_use_overlap_and_all_lie_in_the_ring(sizes: list[int]) -> None:
    ring, live = Ring(80), dict[int, tuple[int, int]]()
    for number, size in enumerate(sizes):
        while not ring.has_room(size):
            oldest = ring.oldest
            assert oldest is not None, "an empty ring has room for half its capacity"
            del live[oldest]
            ring.release_oldest()
        start = ring.take(number, size)
        assert start >= 0
        assert start + size <= 80
        for other_start, other_end in live.values():
            assert start + size <= other_start or other_end <= start
        live[number] = (start, start + size)
        assert len(ring) == len(live)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    eager=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_where_a_region_lies_does_not_depend_on_when_others_were_given_back(
    sizes: list[int], eager: list[bool]
) -> None:
    """Ranks give back at different times, and must still write to the same place."""
    lazy, hasty = Ring(80), Ring(80)
    for number, size in enumerate(sizes):
        while hasty.oldest is not None and eager[number]:
            hasty.release_oldest()
        starts = []
        for ring in (lazy, hasty):
            while not ring.has_room(size):
                ring.release_oldest()
            starts.append(ring.take(number, size))
        assert starts[0] == starts[1]


@given(st.integers(0, 10**6))
def test_aligned_sizes_are_whole_cache_lines(nbytes: int) -> None:
    assert 0 <= aligned(nbytes) - nbytes < 64
    assert aligned(nbytes) % 64 == 0


# -- segments -------------------------------------------------------------------------------------


def test_what_is_written_through_one_mapping_is_read_through_another() -> None:
    made = SegmentFile.make(1 << 16)
    opened = SegmentFile.open(os.getpid(), made.fd, made.inode)
    ours, theirs = map_segment(made), map_segment(opened)
    made.close()
    opened.close()
    assert ours.numel() == theirs.numel() == 1 << 16
    assert not theirs.any()
    ours[-1] = 7
    assert theirs[-1] == 7


def test_a_segment_has_no_name_and_cannot_be_made_smaller_or_larger() -> None:
    before = set(Path("/dev/shm").iterdir())
    made = SegmentFile.make(1 << 16)
    try:
        assert set(Path("/dev/shm").iterdir()) == before
        for size in (1 << 15, 1 << 17):
            with pytest.raises(PermissionError):
                os.ftruncate(made.fd, size)
    finally:
        made.close()


def test_every_page_of_a_segment_is_there_before_it_is_written_to() -> None:
    made = SegmentFile.make(1 << 20)
    try:
        assert os.fstat(made.fd).st_blocks * 512 >= 1 << 20
    finally:
        made.close()


def test_more_memory_than_there_is_is_an_error_and_kills_nobody() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        SegmentFile.make(1 << 50)
    assert caught.value.errno == errno.ENOSPC


def test_a_descriptor_that_means_another_file_now_is_refused() -> None:
    made, other = SegmentFile.make(4096), SegmentFile.make(4096)
    try:
        with pytest.raises(OSError) as caught:
            SegmentFile.open(os.getpid(), made.fd, other.inode)
        assert caught.value.errno == errno.ESTALE
    finally:
        made.close()
        other.close()


def test_a_segment_mapped_in_inference_mode_can_be_written_outside_it() -> None:
    made = SegmentFile.make(4096)
    with torch.inference_mode():
        segment = map_segment(made)
    made.close()
    segment.fill_(1)
    assert segment.all()


def test_a_process_is_on_the_host_it_is_on() -> None:
    assert host_identity()
    assert host_identity() == host_identity()
    assert os.readlink("/proc/self/ns/net") in host_identity()


# -- sums in rank order ---------------------------------------------------------------------------

BLOCK = 65536  # fp32 elements that are added at once


def _parts(ranks: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    if not dtype.is_floating_point:
        return [torch.randint(-9, 9, (numel,), generator=generator).to(dtype) for _ in range(ranks)]
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("numel", [1, 7, BLOCK + 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.complex64])
def test_parts_are_added_in_rank_order(dtype: torch.dtype, ranks: int, numel: int) -> None:
    parts = [part.to(dtype) for part in _parts(ranks, numel, torch.float64)]
    output = torch.empty(numel, dtype=dtype)
    reduce_in_rank_order(parts, output)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(output, total)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_low_precision_is_added_in_fp32_and_rounded_once(dtype: torch.dtype, ranks: int) -> None:
    parts = _parts(ranks, BLOCK + 3, torch.float32)
    parts = [part.to(dtype) for part in parts]
    output = torch.empty(BLOCK + 3, dtype=dtype)
    reduce_in_rank_order(parts, output)
    total = torch.zeros(BLOCK + 3)
    for part in parts:
        total += part.float()
    assert torch.equal(output.float(), total.to(dtype).float())
    rounded_each_time = parts[0].float()
    for part in parts[1:]:
        rounded_each_time = (rounded_each_time + part.float()).to(dtype).float()
    assert ranks == 2 or not torch.equal(output.float(), rounded_each_time)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("op", "define"),
    [
        (dist.ReduceOp.AVG, lambda stack: stack.sum(0) / len(stack)),
        (dist.ReduceOp.MAX, lambda stack: stack.amax(0)),
        (dist.ReduceOp.MIN, lambda stack: stack.amin(0)),
        (dist.ReduceOp.PRODUCT, lambda stack: stack.prod(0)),
    ],
)
def test_other_reductions_follow_their_definition(op, define, dtype, ranks) -> None:  # type: ignore[no-untyped-def]
    parts = [part.to(dtype) for part in _parts(ranks, 33, torch.float32)]
    output = torch.empty(33, dtype=dtype)
    reduce_in_rank_order(parts, output, op)
    wanted = define(torch.stack([part.double() for part in parts]))
    torch.testing.assert_close(output.double(), wanted.to(dtype).double())


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(dist.ReduceOp.SUM, torch.bool), (dist.ReduceOp.AVG, torch.int32)],
)
def test_a_reduction_without_a_meaning_is_refused(
    op: dist.ReduceOp.RedOpType, dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match="reduce in a floating-point dtype"):
        check_reduction(op, dtype)


def test_an_unknown_reduction_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="one of: sum, avg, max, min, product"):
        check_reduction(dist.ReduceOp.BXOR, torch.int32)
