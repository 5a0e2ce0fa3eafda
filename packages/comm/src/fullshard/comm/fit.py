"""Measuring from which size on the direct layout pays, between the ranks at hand.

Owns: the measurement and that all ranks get rank 0's answer. Refuses: using it: see
``set_layout_table``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm import checks
from fullshard.comm.buffers import BufferPool, BufferSource, NewBuffers
from fullshard.comm.composed import default_all_gather, default_reduce_scatter
from fullshard.comm.direct import DirectLayout
from fullshard.comm.direct_gather import DirectTensors, foreach_all_gather_direct
from fullshard.comm.direct_reduce import foreach_reduce_direct
from fullshard.comm.gather import (
    FullTensors,
    GatherLane,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from fullshard.comm.layout import TensorSpec
from fullshard.comm.layouts import LayoutTable, key_of, layout_table
from fullshard.comm.reduce import ReduceLane, foreach_reduce
from fullshard.comm.scaling import reduction_scaling
from fullshard.comm.streams import CommStreams

__all__ = ["fit_layouts"]

_SIZES = tuple(1 << power for power in range(14, 23))  # bytes of a full tensor: 16 KiB to 4 MiB
_LARGE = 4  # tensors of that size, as a transformer's block has
_REST = 4096  # bytes of the small tensor beside them
_GAIN = 0.98  # of the packed time that the direct one must stay below

_Way = Callable[[], None]


@dataclass(frozen=True)
class _Ground:
    """Where to measure: lanes over the ranks at hand, and how often."""

    gather: GatherLane
    reduce: ReduceLane
    device: torch.device
    world_size: int
    rank: int
    repeats: int

    def specs(self, nbytes: int) -> tuple[TensorSpec, ...]:
        """The large tensors and a small one."""
        columns = 4  # 16 bytes, so that any number of rows is eligible
        rows = max(self.world_size, nbytes // (4 * columns) // self.world_size * self.world_size)
        large = TensorSpec(shape=(rows, columns), dtype=torch.float32)
        small = TensorSpec(shape=(_REST // 4,), dtype=torch.float32)
        return (*[large] * _LARGE, small)

    def layout(self, nbytes: int, *, marks: bool) -> DirectLayout:
        """The direct layout of ``specs``, the large ones direct."""
        specs = self.specs(nbytes)
        return DirectLayout(specs, self.world_size, range(_LARGE), marks=len(specs) if marks else 0)


@torch.no_grad()
def fit_layouts(
    process_group: dist.ProcessGroup,
    device: torch.device,
    *,
    sizes: Sequence[int] = _SIZES,
    repeats: int = 9,
) -> LayoutTable:
    """The table in use, with new thresholds for this process group's backend and this device.

    Both layouts move four large tensors beside a small one, by turns, at each size; direct is
    chosen from the size on above which it was always the faster, as rank 0 saw it. A collective
    call: all ranks get the same table. Ranks that share memory, and one rank alone, never use the
    direct layout: they get the table as it is.

    Args:
        process_group: the ranks; those that a model is sharded over.
        device: where the tensors are.
        sizes: bytes of a large tensor, ascending.
        repeats: how often each is measured; the median counts.

    Raises:
        ValueError: if ``sizes`` is empty or not ascending, or ``repeats`` not positive.
    """
    if not sizes or list(sizes) != sorted(sizes) or repeats < 1:
        raise ValueError(
            f"fit_layouts got sizes {list(sizes)} and repeats {repeats}; pass ascending numbers of "
            "bytes and a positive count"
        )
    ground = _ground(process_group, device, repeats)
    finder = checks.list_transport_of(ground.gather.comm, process_group, ground.device)
    if process_group.size() == 1 or finder is None:
        return layout_table()
    gather = _threshold(sizes, lambda nbytes: _gathers(ground, nbytes), ground)
    reduce = _threshold(sizes, lambda nbytes: _reductions(ground, nbytes), ground)
    answer = torch.tensor([gather, reduce], dtype=torch.int64, device=device)
    dist.broadcast(answer, dist.get_process_group_ranks(process_group)[0], group=process_group)
    row = LayoutTable.from_state_dict({"": answer.tolist()}).rows[""]
    return LayoutTable({**layout_table().rows, key_of(process_group, ground.device): row})


def _ground(process_group: dist.ProcessGroup, device: torch.device, repeats: int) -> _Ground:
    streams = CommStreams(device)
    source: BufferSource = BufferPool() if streams.asynchronous_work else NewBuffers()
    world_size = process_group.size()
    gather = GatherLane(
        comm=default_all_gather(process_group),
        process_group=process_group,
        streams=streams,
        device=device,
        name="fit_layouts",
        source=source,
    )
    reduce = ReduceLane(
        comm=default_reduce_scatter(process_group),
        process_group=process_group,
        streams=streams,
        device=device,
        scaling=reduction_scaling(world_size, torch.float32, averages=False),
        name="fit_layouts",
        source=source,
    )
    rank = process_group.rank()
    return _Ground(gather, reduce, gather.device, world_size, rank, repeats)


def _threshold(
    sizes: Sequence[int], ways: Callable[[int], tuple[_Way, _Way]], ground: _Ground
) -> int:
    """The least size from which on direct was always the faster; -1 if it never was."""
    found = -1
    for nbytes in sizes:
        direct, packed = _measured(ways(nbytes), ground)
        if direct >= _GAIN * packed:
            found = -1
        elif found < 0:
            found = nbytes
    return found


def _measured(ways: tuple[_Way, _Way], ground: _Ground) -> tuple[float, float]:
    """Median seconds of both ways, by turns, each begun by all ranks at once."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(-2, ground.repeats):
        both = list(zip(ways, seconds, strict=True))
        for way, found in both if repeat % 2 else reversed(both):
            dist.barrier(group=ground.gather.process_group)
            started = time.perf_counter()
            way()
            ground.gather.streams.current().synchronize()
            if repeat >= 0:
                found.append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _gathers(ground: _Ground, nbytes: int) -> tuple[_Way, _Way]:
    specs, lane = ground.specs(nbytes), ground.gather
    fulls = [torch.zeros(spec.shape, dtype=spec.dtype, device=ground.device) for spec in specs]
    shards = [
        torch.zeros(
            spec.shard_shape(ground.rank, ground.world_size),
            dtype=spec.dtype,
            device=ground.device,
        )
        for spec in specs
    ]
    layout = ground.layout(nbytes, marks=False)
    filled = FullTensors(fulls, layout.packed, lane)
    direct = DirectTensors(fulls, [full.view(-1) for full in fulls[:_LARGE]], layout, lane)
    return (
        lambda: foreach_all_gather_direct(shards, direct, lane).wait(),
        lambda: foreach_all_gather_copy_out(
            foreach_all_gather(shards, layout.packed, lane), filled
        ),
    )


def _reductions(ground: _Ground, nbytes: int) -> tuple[_Way, _Way]:
    specs, lane = ground.specs(nbytes), ground.reduce
    gradients = [torch.zeros(spec.shape, dtype=spec.dtype, device=ground.device) for spec in specs]
    layout = ground.layout(nbytes, marks=True)

    def direct() -> None:
        foreach_reduce_direct(gradients, layout, lane).wait()

    def ordinary() -> None:
        foreach_reduce(gradients, layout.packed, lane).wait()

    return direct, ordinary
