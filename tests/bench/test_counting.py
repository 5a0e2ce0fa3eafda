"""The counter of copies and the tracker of memory, against what can be counted by hand."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable

import pytest
import torch

from fullshard_bench.launching.silent import SilentGroup, listening
from fullshard_bench.measuring.counting import StepCounter
from fullshard_bench.measuring.memory import StorageTracker

N = 64  # elements of a parameter: 256 bytes


def _copied(step: Callable[[torch.Tensor], object]) -> int:
    """Bytes counted in `step`, which is handed a parameter of `N` elements."""
    param = torch.zeros(N)
    counter = StepCounter(silent=False)
    counter.mark([param])
    with counter:
        step(param)
    return counter.copied_bytes()


@pytest.mark.parametrize(
    ("step", "written"),
    [
        (lambda param: param.clone(), 4 * N),
        (lambda param: param.to(torch.bfloat16), 2 * N),
        (lambda param: torch.cat([param, param]), 8 * N),
        (lambda param: torch.empty(N).copy_(param), 4 * N),
        (lambda param: param.copy_(torch.ones(N)), 4 * N),
        (lambda param: torch.nn.functional.pad(param, (0, 6)), 4 * (N + 6)),
        (lambda param: torch._foreach_copy_([param[:8], param[8:]], [torch.ones(8), torch.ones(N - 8)]), 4 * N),  # noqa: E501
        (lambda param: torch.split_with_sizes_copy(param, [N - 4, 4]), 4 * N),
        (lambda param: param.view(8, 8).t().contiguous(), 4 * N),
        (lambda param: param.view(8, 8), 0),
        (lambda param: param + 1, 0),
        (lambda param: param.zero_(), 0),
    ],
)  # fmt: skip
def test_a_copy_counts_the_bytes_that_it_writes(
    step: Callable[[torch.Tensor], object], written: int
) -> None:
    assert _copied(step) == written


def test_a_copy_counts_if_it_leads_to_a_parameter_through_another() -> None:
    def step(param: torch.Tensor) -> None:
        buffer = torch.empty(2 * N)
        buffer[:N].copy_(param)
        buffer.clone()

    assert _copied(step) == 4 * N + 8 * N


def test_copies_of_activations_do_not_count() -> None:
    def step(param: torch.Tensor) -> None:
        activation = torch.ones(N) * param
        activation.clone()
        torch.cat([activation, activation])

    assert _copied(step) == 0


def test_a_copy_into_a_collectives_buffer_counts() -> None:
    group = SilentGroup(0, 4)
    counter = StepCounter(silent=True)
    with counter, listening(counter.on_silent):
        gradient = torch.ones(N) * 2
        packed = gradient.clone()
        group.reduce_scatter_single(torch.empty(N // 4), packed)
    assert counter.copied_bytes() == 4 * N
    assert counter.collectives.counts == {"reduce_scatter": 1}
    assert counter.collectives.nbytes == {"reduce_scatter": 4 * N * 3 // 4}


def test_a_silent_collective_leaves_its_output_alone() -> None:
    group = SilentGroup(1, 4)
    output, mine = torch.full((4,), 7.0), torch.ones(1)
    assert group.all_gather_single(output, mine).wait()
    assert group.allreduce([mine]).is_completed()
    assert output.tolist() == [7.0] * 4
    assert mine.tolist() == [1.0]


def test_peak_memory_is_the_most_that_was_there_at_once() -> None:
    tracker = StorageTracker()
    held = torch.zeros(N)
    tracker.look(held)
    with tracker:
        first = held + 1
        del first
        second = held + 2
        third = second + held
    assert tracker.peak == 3 * 4 * N
    assert tracker.now == 3 * 4 * N
    del second, third
    assert tracker.now == 4 * N


def test_a_storage_that_shrinks_is_seen_to() -> None:
    tracker = StorageTracker()
    tensor = torch.zeros(N)
    tracker.look(tensor)
    tensor.untyped_storage().resize_(0)
    assert (tracker.now, tracker.peak) == (0, 4 * N)


def test_of_memory_that_processes_share_each_counts_its_part() -> None:
    with mmap.mmap(-1, 4 * N) as memory:
        segment = torch.frombuffer(memory, dtype=torch.float32)
        tracker = StorageTracker(sharers=4)
        private = torch.zeros(N)
        tracker.look(segment, private)
        assert tracker.now == segment.nbytes // 4 + private.nbytes
        del segment, tracker


def test_pages_that_are_mapped_twice_count_once() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * N)
        with mmap.mmap(file.fileno(), 4 * N) as whole, mmap.mmap(file.fileno(), 2 * N) as half:
            views = [torch.frombuffer(each, dtype=torch.float32) for each in (half, whole, half)]
            tracker = StorageTracker(sharers=2)
            tracker.look(views)
            assert tracker.now == 4 * N // 2
            del views, tracker


def test_copies_through_shared_memory_are_a_transports_and_count_beyond_what_it_moves() -> None:
    with mmap.mmap(-1, 4 * N) as memory:
        segment = torch.frombuffer(memory, dtype=torch.float32)
        counter = StepCounter(silent=False)
        with counter:
            segment.copy_(torch.ones(N))
            received = segment.clone()
        assert counter.copied_bytes(allowed=4 * N) == 4 * N
        assert counter.copied_bytes(allowed=100 * N) == 0
        del segment, received
