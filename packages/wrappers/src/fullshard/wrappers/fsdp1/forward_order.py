"""The order in which instances run their forward: the same on all ranks, and as in the first step.

Owns the two comparisons of FSDP1, made where ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` asks for them.
Ranks exchange their next gathers in the first iteration, and a difference raises on all ranks.
Later each rank compares with its own first iteration, and warns once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fullshard.wrappers.fsdp1.mesh import Ranks

__all__ = ["ForwardOrder"]

_END = -1  # the root's forward ended


class ForwardOrder:
    """The order of one root's instances."""

    def __init__(self, names: Sequence[Sequence[str]], ranks: Ranks) -> None:
        """Start before the first iteration.

        Args:
            names: per instance, the full names of its own parameters.
            ranks: whose orders must be the same.
        """
        self._names = names
        self._ranks = ranks
        self._first: list[int] = []
        self._known = False
        self._position = -1  # no forward is in progress
        self._silent = False

    @contextmanager
    def iteration(self, *, training: bool) -> Iterator[None]:
        """Surrounds a forward of the root; only one in training counts.

        Raises:
            RuntimeError: as ``visit``, if another rank has not come to the end.
        """
        self._position = 0 if training else -1
        try:
            yield
            if self._position >= 0:
                self._end()
        except BaseException:
            if not self._known:
                self._first.clear()
            raise
        finally:
            self._position = -1

    def visit(self, instance: int) -> None:
        """Take notice that an instance's forward begins.

        Raises:
            RuntimeError: on every rank, in the first iteration, if another is at another instance.
        """
        if self._position < 0 or not self._names[instance]:
            return
        if self._known:
            self._compare(instance)
        else:
            self._exchange(instance)
            self._first.append(instance)
        self._position += 1

    def _end(self) -> None:
        if self._known:
            self._compare(_END)
        else:
            self._exchange(_END)
            self._known = True

    def _compare(self, instance: int) -> None:
        expected = self._first[self._position] if self._position < len(self._first) else _END
        if expected == instance or self._silent:
            return
        self._silent = True
        warnings.warn(
            "the forward order differs from that of the first iteration on rank "
            f"{dist.get_rank()}: expected {self._said(expected)}, came {self._said(instance)}. "
            "That is fine if all ranks do it alike; else collectives may hang",
            UserWarning,
            stacklevel=4,
        )

    def _exchange(self, instance: int) -> None:
        known = [[dist.get_rank(), instance]]
        for process_group in self._ranks.process_groups:  # first within a row, then within a column
            mine = torch.tensor(known, dtype=torch.int64, device=self._ranks.device)
            found = [torch.empty_like(mine) for _ in range(process_group.size())]
            dist.all_gather(found, mine, group=process_group)
            known = torch.cat(found).tolist()
        if len({came for _, came in known}) > 1:
            told = "; ".join(f"rank {rank} is at {self._said(came)}" for rank, came in known)
            raise RuntimeError(
                f"the forward order differs across ranks: {told}. Run the same modules in the same "
                "order on every rank, or see fullshard.policies.CanonicalOrder"
            )

    def _said(self, instance: int) -> str:
        if instance == _END:
            return "the end of the forward"
        return f"the gather of {', '.join(self._names[instance])}"
