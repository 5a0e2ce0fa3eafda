"""Gathers in memory that all ranks map: who writes when, and what everybody reads."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import (
    CollectiveMismatchError,
    DefaultAllGather,
    GatherConfig,
    Layout,
    PeerLostError,
    ProcessGroupTransport,
    TensorSpec,
)
from fullshard.comm.collectives.in_place import SharedTensors, foreach_all_gather_in_place
from fullshard.comm.transports.collective import Collective
from fullshard.samehost import SharedMemoryTransport
from fullshard.samehost.automatic import AutomaticTransport
from fullshard.samehost.segment import SegmentFile
from support.apart import private_memory
from support.collectives import gather_config, shard_of
from support.ranks import RanksFailed, distributed, run_on_ranks, world

SPECS = (
    TensorSpec(shape=(7, 3), dtype=torch.float32),
    TensorSpec(shape=(5, 6), dtype=torch.bfloat16, dim=1),
    TensorSpec(shape=(), dtype=torch.float32),
    TensorSpec(shape=(0, 4), dtype=torch.float32),
)


def values(spec: TensorSpec, turn: int) -> torch.Tensor:
    return (torch.arange(spec.numel).view(spec.shape) + 100.0 * turn).to(spec.dtype)


def my_shard_of(full: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    return shard_of(full, spec, dist.get_rank(), dist.get_world_size())


def tensors_in(memory: torch.Tensor, specs: tuple[TensorSpec, ...]) -> list[torch.Tensor]:
    fulls, start = [], 0
    for spec in specs:
        nbytes = spec.numel * spec.dtype.itemsize
        fulls.append(memory.narrow(0, start, nbytes).view(spec.dtype).view(spec.shape))
        start += -(-nbytes // 64) * 64
    return fulls


def opened() -> tuple[SharedTensors, GatherConfig]:
    """Tensors of ``SPECS`` in a shared buffer of all ranks, and what gathers them."""
    buffer = SharedMemoryTransport().open_shared_buffer(world(), 4096)
    config = gather_config(world(), DefaultAllGather(), name="x")
    layout = Layout(SPECS, dist.get_world_size())
    return SharedTensors(buffer, tensors_in(buffer.memory, SPECS), layout, config), config


@distributed(2, 4, matrix=[4])
def test_each_gather_leaves_every_ranks_shards_in_the_full_tensors() -> None:
    placed, config = opened()
    fulls = tensors_in(placed.buffer.memory, SPECS)
    for turn in range(3):
        shards = [
            my_shard_of(values(spec, turn), spec).float() for spec in SPECS
        ]  # cast on the way
        foreach_all_gather_in_place(shards, placed, config).wait()
        for full, spec in zip(fulls, SPECS, strict=True):
            assert torch.equal(full, values(spec, turn))
        placed.buffer.leave()


@distributed(2)
def test_nobody_writes_before_all_have_left() -> None:
    buffer = SharedMemoryTransport().open_shared_buffer(world(), 64)
    rank = dist.get_rank()

    def write(value: int) -> None:
        buffer.memory[rank] = value

    buffer.gather(lambda: write(1)).wait()
    if rank == 0:
        buffer.leave()
        written = threading.Event()

        def write_again() -> None:
            write(2)
            written.set()

        def again() -> None:
            buffer.gather(write_again).wait()

        thread = threading.Thread(target=again)
        thread.start()
        dist.barrier()  # rank 1 has looked, and has not left
        assert not written.is_set()
        dist.barrier()
        thread.join()
        assert written.is_set()
    else:
        assert buffer.memory[:2].tolist() == [1, 1]
        dist.barrier()
        assert buffer.memory[:2].tolist() == [1, 1]
        dist.barrier()
        buffer.leave()
        buffer.gather(lambda: write(2)).wait()
    assert buffer.memory[:2].tolist() == [2, 2]
    buffer.leave()


@distributed(2)
def test_a_gather_that_nobody_wants_is_waited_for_and_left() -> None:
    placed, config = opened()
    shards = [my_shard_of(values(spec, 0), spec) for spec in SPECS]
    for _ in range(3):  # would wait for ever, if the buffer had not been left
        foreach_all_gather_in_place(shards, placed, config).discard()


@distributed(2)
def test_more_gathers_than_any_rank_may_be_ahead_by_still_end() -> None:
    buffers = [SharedMemoryTransport().open_shared_buffer(world(), 64) for _ in range(2)]
    for turn in range(150):
        works = [buffer.gather(lambda: None) for buffer in buffers]
        for buffer, work in zip(buffers, works, strict=True):
            work.wait()
            buffer.leave()
        if turn % 50 == 0:
            dist.barrier()


class OwnAllocator:
    empty = staticmethod(torch.zeros)


@distributed(2)
def test_there_is_a_shared_buffer_only_where_the_collective_does_nothing_else_itself() -> None:
    class Own(DefaultAllGather):
        def __call__(self, *args: object, **kwargs: object) -> None:
            """Something else."""

    def is_opened(comm: DefaultAllGather) -> bool:
        return Collective(comm).offers.open_shared_buffer(world(), 64) is not None

    automatic = AutomaticTransport()
    assert is_opened(DefaultAllGather(transport=automatic))
    assert not is_opened(DefaultAllGather(transport=ProcessGroupTransport()))
    assert not is_opened(DefaultAllGather(transport=automatic, allocator=OwnAllocator()))
    assert not is_opened(Own(transport=automatic))
    with private_memory():
        assert not is_opened(DefaultAllGather(transport=automatic))


def _gather_in_another_buffer() -> str:
    transport = SharedMemoryTransport()
    buffers = [transport.open_shared_buffer(world(), 4096) for _ in range(2)]
    with pytest.raises(CollectiveMismatchError) as caught:
        buffers[dist.get_rank()].gather(lambda: None).wait()
    return str(caught.value)


def test_ranks_that_gather_in_different_buffers_of_one_size_raise() -> None:
    found = run_on_ranks(_gather_in_another_buffer, 2, fresh=True)
    for rank, said in enumerate(found):
        assert f"rank {1 - rank} in a gather of 4096 bytes per rank of other tensors" in said


@distributed(2)
def test_without_memory_there_is_no_shared_buffer_on_any_rank() -> None:
    # a new file, or one of a buffer that is free, grown
    no_memory = {name: Mock(side_effect=OSError(12, "no memory")) for name in ("make", "grow")}
    failing = patch.multiple(SegmentFile, **no_memory)
    with failing if dist.get_rank() == 0 else patch.dict({}):
        assert AutomaticTransport().open_shared_buffer(world(), 64) is None
    assert AutomaticTransport().open_shared_buffer(world(), 64) is not None


def _killed_in_a_shared_buffer() -> None:
    buffer = SharedMemoryTransport().open_shared_buffer(world(), 64)
    buffer.gather(lambda: None).wait()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.leave()
    buffer.gather(lambda: None)


def test_a_rank_killed_before_it_left_is_named_by_those_who_wait_to_write() -> None:
    before = sorted(Path("/dev/shm").iterdir())
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_killed_in_a_shared_buffer, 2, fresh=True)
    text = caught.value.reports[0].text
    assert re.search(rf"{PeerLostError.__name__}: rank 1 (\(process \d+\) )?has ended", text), text
    assert sorted(Path("/dev/shm").iterdir()) == before
