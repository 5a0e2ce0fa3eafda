"""A plan's step timed on this machine: records what is to be measured, and measures it.

Owns the way from ``device="here"`` to a timeline: the recorder that keeps operations as they can be
called again, and the engine's gathers, whose own host time is measured apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fullshard.comm import Event, EventKind, observe
from fullshard.preflight.costs.calls import Calls
from fullshard.preflight.costs.collectives import Collective
from fullshard.preflight.costs.here import UNSHARD, Here, MeasuredCosts
from fullshard.preflight.costs.kernels import Kernel
from fullshard.preflight.planning.cpu_timeline import replay_on_cpu
from fullshard.preflight.planning.memory.places import Places
from fullshard.preflight.planning.recorder import Launch, Recorder
from fullshard.preflight.planning.timeline import Timeline
from fullshard.preflight.races.collectives import Launched

__all__ = ["Measuring"]


class Measuring:
    """A plan for this machine.

    Attributes:
        recorder: records its step.

    Args:
        here: how it is measured.
        sizes: of the mesh's axes.
        places: returns the place of an operation in the step.

    Raises:
        ValueError: if so many ranks cannot measure here, or links do not fit the mesh.
    """

    def __init__(self, here: Here, sizes: tuple[int, ...], places: Places) -> None:
        """Measure nothing yet."""
        self.recorder = Recorder(places, Calls().kernel_of)
        self._costs = MeasuredCosts(here, sizes)
        self._groups: set[str] = set()

    @contextmanager
    def following(self, keep: Callable[[Launched], object]) -> Iterator[None]:
        """Inside the ``with`` block operations, collectives and gathers are recorded.

        Args:
            keep: as for ``Recorder.following``.
        """
        with self.recorder.following(streams=False, keep=keep), observe(self):
            yield

    def on_event(self, event: Event) -> None:
        """Record the engine's own time for each gather."""
        if event.kind is EventKind.UNSHARD:
            self._groups.add(event.name)
            self.recorder.worked(Kernel(UNSHARD, 0, 0, torch.float32))

    def timeline(self, parameters: int) -> Timeline:
        """Measure what was recorded, and put it in time.

        Args:
            parameters: how many tensors the model has as parameters.

        Raises:
            RuntimeError: if a process that measures fails.
            ValueError: if a collective cannot be measured.
        """
        records = self.recorder.records
        work = [each.work for each in records if isinstance(each, Launch)]
        self._costs.measure(
            [each for each in work if isinstance(each, Kernel)],
            [each for each in work if isinstance(each, Collective)],
            max(1, round(parameters / max(1, len(self._groups)))),
            self.recorder.allocations,
        )
        return replay_on_cpu(records, self.recorder.streams, self._costs)
