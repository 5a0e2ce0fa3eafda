"""Small reductions that wait for company, and when that pays.

Owns: the way of one list of gradients through a bucket. A bucket saves launches and costs one more
copy of its bytes; the transport knows from which size on that does not pay. Refuses: devices with
streams, where nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fullshard.comm.buffers.packing import pack_gradients, scale_tensors
from fullshard.comm.collectives.bucketer import ReduceScatterBucketer
from fullshard.comm.collectives.reduce import ReducedShards
from fullshard.comm.debug.debug import check_layout
from fullshard.comm.layouts import checks
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.runtime.grad_mode import without_grad
from fullshard.comm.runtime.observer import EventKind, emit, is_observed
from fullshard.comm.runtime.ranges import ranged
from fullshard.comm.transports.config import ReduceLane

__all__ = ["BucketedReduce", "bucket_pays", "foreach_reduce_bucketed"]


def bucket_pays(layout: Layout, lane: ReduceLane) -> bool:
    """Whether a reduction is better off in a bucket: all ranks find the same.

    It is where its collective says that launches of this size cost more than a copy
    (``bucketed_up_to``), and the device has no streams.
    """
    if layout.world_size == 1 or not lane.streams.asynchronous_work:
        return False
    limit = getattr(lane.comm, "bucketed_up_to", None)
    nbytes = layout.buffers[0].slice_nbytes * layout.world_size
    return limit is not None and nbytes <= limit(lane.process_group, lane.device)


@dataclass(eq=False)
class BucketedReduce:
    """A reduction in a bucket; used as a ``ReduceInFlight``.

    Attributes:
        layout: where things lie.
        lane: what it was issued with.
        bucketer: whose bucket.
        output: this rank's slice of the result; None while it is not there.
    """

    layout: Layout
    lane: ReduceLane
    bucketer: ReduceScatterBucketer
    output: torch.Tensor | None = None
    _result: ReducedShards | None = field(default=None, init=False, repr=False)

    @property
    def ready(self) -> bool:
        """Whether ``wait()`` would not launch or wait."""
        return self.output is not None

    def advance(self) -> None:
        """Nothing: it is launched with the others."""

    def take(self, output: torch.Tensor) -> None:
        """Take the result over: the bucket's callback."""
        scale_tensors(output, self.layout, self.lane.scaling.post)
        self.output = output

    def land(self) -> None:
        """As ``wait()``."""
        self.wait()

    @without_grad
    def wait(self) -> ReducedShards:
        """The reduced shards; later calls give the same. Launches what waits in the buckets."""
        if self._result is None:
            if self.output is None:
                self.bucketer.flush()
            assert self.output is not None, "flush() hands out every result"
            rank = self.lane.process_group.rank()
            self._result = ReducedShards.of(self.output, self.layout, rank)
        return self._result


@ranged("post_backward_reduce")
def foreach_reduce_bucketed(
    gradients: Sequence[torch.Tensor | None],
    layout: Layout,
    lane: ReduceLane,
    bucketer: ReduceScatterBucketer,
) -> BucketedReduce:
    """As ``foreach_reduce``, with a launch that other small reductions share.

    Args:
        gradients: as for ``foreach_reduce``.
        layout: as for ``foreach_reduce``.
        lane: as for ``foreach_reduce``; the bucketer's own collective reduces.
        bucketer: where it waits.

    Raises:
        ValueError: as ``foreach_reduce``.
        CollectiveMismatchError: in debug mode, if the ranks did not come to the same reduction.
    """
    rank = checks.check_world(layout, lane.process_group, lane.name)
    checks.check_gradients(gradients, layout, lane.device, lane.name)
    check_layout(EventKind.REDUCE_SCATTER, lane.name, layout, lane.process_group, lane.scaling)
    buffers = lane.source.take(lane.comm, layout, rank, lane.device)
    pack_gradients(buffers, gradients, lane.scaling)
    (packed,) = buffers.tensors
    if is_observed():
        emit(EventKind.COPY_IN, lane.name, rank=rank, nbytes=packed.nbytes, stream="current")
    reduction = BucketedReduce(layout, lane, bucketer)
    bucketer.reduce_scatter_async(
        packed.view(layout.world_size, -1),
        lane.process_group,
        reduction.take,
        op=lane.scaling.op,
    )
    lane.source.give_back(buffers)
    return reduction
