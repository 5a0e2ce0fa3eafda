"""Lists of tensors gathered and reduced in one call, for programs that use this package alone.

Owns: choosing layout, streams, scaling and, unless the caller does, the collective as most programs
would. Refuses: overlap: use ``gather`` and ``reduce`` for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm.collectives.gather import foreach_all_gather, foreach_all_gather_copy_out
from fullshard.comm.collectives.reduce import foreach_reduce
from fullshard.comm.layouts.layout import TensorSpec, rank_major
from fullshard.comm.layouts.scaling import backend_averages, reduction_scaling
from fullshard.comm.runtime.required import require
from fullshard.comm.runtime.streams import CommStreams, canonical_device
from fullshard.comm.transports.collective import AllGather, ReduceScatter
from fullshard.comm.transports.config import GatherConfig, ReduceConfig
from fullshard.comm.transports.default import default_all_gather, default_reduce_scatter

__all__ = ["all_gather_tensors", "reduce_scatter_tensors"]


def all_gather_tensors(
    shards: Sequence[torch.Tensor],
    specs: Sequence[TensorSpec],
    process_group: dist.ProcessGroup,
    *,
    comm: AllGather | None = None,
) -> list[torch.Tensor]:
    """The full tensors, of ``specs[i].shape`` and dtype, of which each rank passes its shard.

    A single collective moves all tensors.

    Args:
        shards: this rank's shards, ``specs[i].shard_shape(rank, world_size)``, all on one device.
            A shard of another dtype than its spec's is cast, unless the cast could lose more than
            precision.
        specs: the full tensors; the same on all ranks.
        process_group: the ranks that hold the shards.
        comm: the all-gather; None: the default one of these ranks.

    Raises:
        TypeError: if ``comm`` is no all-gather.
        ValueError: if shards do not fit specs, in shape or in the kind of dtype, or are on several
            devices.
    """
    comm = default_all_gather(process_group) if comm is None else comm
    require(AllGather, comm)
    if not specs and not shards:
        return []
    layout = rank_major(tuple(specs), process_group.size())
    device = _device_of(shards)
    streams = CommStreams.shared(device)
    config = GatherConfig(
        comm=comm,
        process_group=process_group,
        streams=streams,
        device=device,
        name="all_gather_tensors",
    )
    streams.synchronize_with_current()
    in_flight = foreach_all_gather(shards, layout, config)
    arrive = [spec.arrives_as for spec in layout.specs]
    outputs = [torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in arrive]
    foreach_all_gather_copy_out(in_flight, outputs)
    return outputs


def reduce_scatter_tensors(
    gradients: Sequence[torch.Tensor],
    specs: Sequence[TensorSpec] | None,
    process_group: dist.ProcessGroup,
    *,
    divide_factor: float | torch.Tensor | None = None,
    comm: ReduceScatter | None = None,
) -> list[torch.Tensor]:
    """This rank's shard of each tensor's mean over ranks; one collective per dtype.

    Args:
        gradients: full tensors of the same shapes on all ranks, all on one device.
        specs: their specs (the dtype is the one to reduce in), or None: their own shapes and
            dtypes, sharded on dim 0.
        process_group: the ranks to reduce over.
        divide_factor: divide the sum by this instead of the number of ranks.
        comm: the reduce-scatter; None: the default one of these ranks.

    Raises:
        TypeError: if ``comm`` is no reduce-scatter.
        ValueError: if gradients do not fit specs or are on several devices, or a dtype is not
            floating-point.
    """
    comm = default_reduce_scatter(process_group) if comm is None else comm
    require(ReduceScatter, comm)
    if specs is None:
        specs = [TensorSpec(shape=tuple(each.shape), dtype=each.dtype) for each in gradients]
    if len(specs) != len(gradients):
        raise ValueError(
            f"reduce_scatter_tensors got {len(gradients)} gradients and {len(specs)} specs; pass "
            "one spec each, or None."
        )
    if not gradients:
        return []
    device = _device_of(gradients)
    in_flight = []
    for dtype in dict.fromkeys(spec.dtype for spec in specs):
        indices = [index for index, spec in enumerate(specs) if spec.dtype is dtype]
        layout = rank_major(tuple(specs[index] for index in indices), process_group.size())
        config = ReduceConfig(
            comm=comm,
            process_group=process_group,
            streams=CommStreams.shared(device),
            device=device,
            scaling=reduction_scaling(
                process_group.size(),
                dtype,
                averages=backend_averages(process_group, dtype, device),
                divide_factor=divide_factor,
            ),
            name="reduce_scatter_tensors",
        )
        members = [gradients[index] for index in indices]
        in_flight.append((indices, foreach_reduce(members, layout, config)))
    shards: dict[int, torch.Tensor] = {}
    for indices, reduction in in_flight:
        shards.update(zip(indices, reduction.wait().shards, strict=True))
    return [shards[index] for index in range(len(gradients))]


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    if not tensors:
        raise ValueError("got no tensors for the given specs; pass one per spec.")
    return canonical_device(tensors[0].device)
