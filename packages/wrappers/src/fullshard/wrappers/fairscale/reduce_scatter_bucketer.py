"""FairScale's ``ReduceScatterBucketer``: small tensors summed and scattered in one launch.

Owns what waits, per process group, dtype and device, and the callbacks that are handed the results.
``fullshard.comm.reduce_scatter_tensors`` launches them together. Refuses: overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm import reduce_scatter_tensors

__all__ = ["ReduceScatterBucketer"]

Callback = Callable[[torch.Tensor], None]
_Key = tuple[dist.ProcessGroup, torch.dtype, torch.device]


@dataclass(frozen=True)
class _Waiting:
    """The parts of all ranks, ``[world, ...]``, and who wants this rank's sum."""

    parts: torch.Tensor
    callback: Callback | None


class ReduceScatterBucketer:
    """Sums and scatters many small tensors in few launches, as ``fairscale.internal``'s does.

    Call it on all ranks, in the same order. A large input overtakes small ones that wait.

    Attributes:
        bucket_cap_mb: as given.
    """

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        """Make a bucketer in which nothing waits.

        Args:
            bucket_cap_mb: MiB of input, over all ranks' parts, that share a launch; 0 or less:
                every call is launched at once.

        Raises:
            TypeError: if it is no number.
        """
        if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)):
            raise TypeError(f"bucket_cap_mb is {bucket_cap_mb!r}; pass a number of MiB")
        self.bucket_cap_mb = bucket_cap_mb
        self._capacity = bucket_cap_mb * 2**20
        self._buckets: dict[_Key, list[_Waiting]] = {}

    @torch.no_grad()
    def reduce_scatter_async(
        self,
        input_list: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        callback_fn: Callback | None = None,
    ) -> None:
        """Sums ``input_list`` over the ranks, now or with those that follow.

        Args:
            input_list: a part for each rank, of one shape, floating-point dtype and device. The
                tensors may be freed afterwards.
            group: the ranks.
            callback_fn: is handed this rank's part of the sum, at ``flush()`` at the latest.

        Raises:
            ValueError: if there is not one part for each rank, or they differ in shape, dtype or
                device.
        """
        _check(input_list, group)
        item = _Waiting(torch.stack(tuple(input_list)), callback_fn)
        key = (group, item.parts.dtype, item.parts.device)
        if item.parts.nbytes > self._capacity:
            _launch(group, [item])
            return
        bucket = self._buckets.setdefault(key, [])
        if _nbytes(bucket) + item.parts.nbytes > self._capacity:
            self._empty(key)
        bucket.append(item)
        if _nbytes(bucket) >= self._capacity:
            self._empty(key)

    @torch.no_grad()
    def flush(self) -> None:
        """Launch what waits, and return once every callback was called."""
        for key in self._buckets:
            self._empty(key)

    def teardown(self) -> None:
        """Forget process groups and devices; the next call may be of others.

        Raises:
            RuntimeError: if results are still waiting.
        """
        waiting = sum(map(len, self._buckets.values()))
        if waiting:
            raise RuntimeError(
                f"teardown() was called with {waiting} reductions whose results were not handed "
                "out; call flush() first, on every rank"
            )
        self._buckets.clear()

    def _empty(self, key: _Key) -> None:
        items = self._buckets[key][:]
        self._buckets[key].clear()
        _launch(key[0], items)


def _nbytes(items: Sequence[_Waiting]) -> int:
    return sum(item.parts.nbytes for item in items)


def _launch(group: dist.ProcessGroup, items: Sequence[_Waiting]) -> None:
    """Launch the waiting tensors, and pass the results to their callbacks."""
    parts = [item.parts for item in items]
    sums = reduce_scatter_tensors(parts, None, group, divide_factor=1.0)
    for item, result in zip(items, sums, strict=True):
        if item.callback is not None:
            item.callback(result.view(item.parts.shape[1:]))


def _check(inputs: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    if len(inputs) != group.size():
        raise ValueError(
            f"reduce_scatter_async got {len(inputs)} inputs for {group.size()} ranks; pass a part "
            "for each, in rank order."
        )
    first = inputs[0]
    for index, part in enumerate(inputs):
        if (part.shape, part.dtype, part.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"input {index} is {part.dtype} of shape {tuple(part.shape)} on {part.device}, "
                f"input 0 {first.dtype} of shape {tuple(first.shape)} on {first.device}; all parts "
                "must be alike. Pad them to one shape."
            )
