"""The sums of a step over replica groups, in a thread of their own.

Owns the order of messages of one rank, how gradients are added, the vote, and the first error of a
step: after it, nothing more is sent, and the connections are closed. The main class is
``Exchanger``. Refuses: recovery, and who is in a quorum.

[Note: operations] Before each message, the ranks of a step compare what they do next. If a group
reduces other gradients, all ranks notice at the same operation, and ``commit`` raises on all. The
connections stay open, so that the comparison reaches each rank. If a group ends the step before
others, as its backward raised, all drop the step.

[Note: order of sums] The gradients of contributing groups are added in the order of groups, in
float32 or wider, and the sum is multiplied by ``1 / groups`` for an average. Therefore every group
has the same bits, whatever its number of ranks, and a replay can compute them again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from fullshard.comm import Layout, ReduceInFlight
from fullshard.elastic.errors import ReplicaGroupError
from fullshard.elastic.links import STEP_END, Links
from fullshard.elastic.pieces import specs_digest

__all__ = ["Exchanger", "added"]

_T = TypeVar("_T")


class Exchanger:
    """Sums slices over the groups of a step; an ``Exchange``.

    Args:
        average: see ``ElasticOptions``.
        between: see ``ElasticOptions``.
    """

    def __init__(self, *, average: bool, between: torch.dtype | None) -> None:
        self._average = average
        self._between = between
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fullshard-elastic")
        self._lock = threading.Lock()
        self._links: Links | None = None
        self._error: str = ""
        self._difference: ReplicaGroupError | None = None
        self._in_step = False

    @property
    def way(self) -> str:
        """How gradients are added, in words."""
        sent_as = "the reduce dtype" if self._between is None else str(self._between)
        return f"{'averages' if self._average else 'adds'} gradients sent in {sent_as}"

    @property
    def error(self) -> str:
        """The first error of the step, as text; empty if there is none."""
        return self._error

    def open(self, links: Links) -> None:
        """Begin a step over ``links``."""
        self._links, self._error, self._difference = links, "", None
        self._in_step = True

    def end(self) -> None:
        """End the step."""
        self._in_step = False

    def close(self) -> None:
        """End the thread, after what it does now."""
        self._thread.shutdown()

    def fail(self, reason: str) -> None:
        """Drop the step: the first reason counts."""
        with self._lock:
            self._error = self._error or reason
        if self._links is not None:
            self._links.close()

    def _run(self, operation: str, call: Callable[[Links], _T], otherwise: _T) -> Future[_T]:
        """Run ``call`` after what was asked for before; ``otherwise`` once the step is dropped.

        ``operation`` is compared with other ranks; see [Note: operations].
        """

        def guarded() -> _T:
            links = self._links
            if self._error or links is None:
                return otherwise
            try:
                links.require_same(operation)
                with torch.no_grad():
                    return call(links)
            except ReplicaGroupError as error:
                self._difference, self._error = error, str(error)
                return otherwise
            except Exception as error:  # of a connection, most likely; the step is dropped
                self.fail(f"{type(error).__name__}: {error}")
                return otherwise

        return self._thread.submit(guarded)

    def submit(self, flight: ReduceInFlight) -> Future[torch.Tensor | None]:
        """See ``Exchange``.

        Raises:
            ReplicaGroupError: outside of a step.
        """
        if not self._in_step:
            raise ReplicaGroupError(
                f"gradients of {flight.plan.config.name or 'the model'} were reduced outside of a "
                "step; call begin() before the forward, and commit() after the backward"
            )
        layout, output, config = flight.plan.layout, flight.output, flight.plan.config
        sent_as = output.dtype if self._between is None else self._between
        operation = (
            f"the reduction of {config.name or 'the root'} (tensors "
            f"{specs_digest(layout.specs, layout.mask_numel)}, {sent_as})"
        )
        streams, event = config.streams, flight.event

        def on_host(links: Links) -> torch.Tensor | None:
            if output.device.type == "cpu":
                output.copy_(self._total(links, output, layout, sent_as))
                return None
            with streams.use(streams.all_reduce):
                streams.all_reduce.wait_event(event)
                return self._total(links, output.cpu(), layout, sent_as)

        return self._run(operation, on_host, None)

    def _total(
        self, links: Links, output: torch.Tensor, layout: Layout, sent_as: torch.dtype
    ) -> torch.Tensor:
        parts = links.contributions(output, layout, sent_as)
        return added(parts, output.dtype, average=self._average)

    def from_contributors(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the ``values`` of each contributing group; the own ones alone if dropped.

        Raises:
            ReplicaGroupError: if another group does something else at this place of the step.
        """
        host = values.detach().cpu().reshape(-1)
        operation = f"a sum() or from_first() of {host.numel()} numbers, {host.dtype}"
        found = self._run(operation, lambda links: links.from_contributors(host), [host]).result()
        self._raise_difference()
        return [each.view(values.shape).to(values.device) for each in found]

    def vote(self) -> bool:
        """Return whether the step went well on all connected ranks.

        Raises:
            ReplicaGroupError: if another group reduced other gradients in the step.
        """
        ok = self._run(STEP_END, lambda links: True, False).result()
        self._raise_difference()
        return ok

    def _raise_difference(self) -> None:
        if self._difference is not None:
            raise self._difference


def added(parts: list[torch.Tensor], dtype: torch.dtype, *, average: bool) -> torch.Tensor:
    """Return the sum of ``parts`` in ``dtype``; see [Note: order of sums]."""
    wide = torch.promote_types(dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total.add_(part)  # widened element by element
    if average and len(parts) > 1:
        total.mul_(1 / len(parts))
    return total.to(dtype)
