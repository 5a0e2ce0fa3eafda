"""FairScale's ``ReduceScatterBucketer``: its arguments, over the bucketer of ``fullshard.comm``.

Owns the names. Which calls share a launch, and the memory, is ``comm``'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fullshard import comm

__all__ = ["ReduceScatterBucketer"]


class ReduceScatterBucketer:
    """Sums and scatters many small tensors in few launches, as ``fairscale.internal``'s does.

    All ranks make the same calls in the same order. A large input overtakes small ones that wait.

    Attributes:
        bucket_cap_mb: as given.
    """

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        """Makes a bucketer without memory.

        Args:
            bucket_cap_mb: MiB of input, over all ranks' parts, that share a launch; 0 or less:
                every call is launched at once.

        Raises:
            TypeError: if it is no number.
        """
        self.bucket_cap_mb = bucket_cap_mb
        self._bucketer = comm.ReduceScatterBucketer(bucket_cap_mb)

    def reduce_scatter_async(
        self,
        input_list: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
        callback_fn: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Sums ``input_list`` over the ranks, now or with those that follow.

        Args:
            input_list: a part for each rank, of one shape, dtype and device.
            group: the ranks.
            callback_fn: is handed this rank's part of the sum, at ``flush()`` at the latest.

        Raises:
            ValueError: if there is not one part for each rank, or they differ in shape, dtype or
                device.
        """
        self._bucketer.reduce_scatter_async(input_list, group, callback_fn)

    def flush(self) -> None:
        """Launches what waits, and returns once every callback was called."""
        self._bucketer.flush()

    def teardown(self) -> None:
        """Frees the memory; the next call gets new.

        Raises:
            RuntimeError: if results were not handed out yet.
        """
        self._bucketer.teardown()
