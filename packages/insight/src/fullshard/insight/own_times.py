"""The own time of one rank, by step, phase and module: what passed while it waited for no rank.

``OwnTimesReader`` reads the time stamps of a ``Timeline``, without the clock of another rank.
``slow_ranks`` compares the results of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fullshard.comm import EventKind
from fullshard.comm.spi import Mark
from fullshard.insight.timeline import Taken

__all__ = ["OwnTimes", "OwnTimesReader", "Phase", "Step"]

_SECOND = 1e9
_NONE = -1e-6  # instead of a wait that did not happen
_WAITS = (Mark.WAIT, Mark.WAIT_GATHER, Mark.WAIT_REDUCTION)


class Phase(StrEnum):
    """A part of a training step, as seen from outside of the program."""

    INPUT = "input"
    """Between the end of a step, or of a backward, and the next forward of the root."""
    FORWARD = "forward"
    """From a root's forward to its backward; the loss included."""
    BACKWARD = "backward"
    """From the first gradient of an output to the end of the root's backward."""
    OPTIMIZER = "optimizer"
    """From the end of the backward to the end of the optimizer's step: clipping included."""
    FILES = "file system"
    """In ``file_access``: saves and loads of ``fullshard.checkpoint``, and blocks of a user's."""


@dataclass(kw_only=True)
class Step:
    """A step of a rank, in seconds.

    Attributes:
        number: how many optimizers' steps had ended, since the watch began, when it was over.
        own: by phase and module: time in which the rank waited for no other.
        waits: by what it waited for.
    """

    number: int = 0
    own: defaultdict[tuple[Phase, str], float] = field(default_factory=lambda: defaultdict(float))
    waits: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def phase(self, phase: Phase) -> float:
        """Return the own time in a phase."""
        return sum(seconds for (each, _), seconds in self.own.items() if each is phase)

    @property
    def seconds(self) -> float:
        """The time of the step, waits included, access to files not."""
        files = self.phase(Phase.FILES)
        return sum(self.own.values()) + sum(self.waits.values()) - files


@dataclass(frozen=True, kw_only=True)
class OwnTimes:
    """The steps of one rank.

    Attributes:
        steps: complete steps, in order.
    """

    steps: tuple[Step, ...]

    def value(self) -> dict[str, Any]:
        """Return the steps as a JSON value, in microseconds: all have one list of columns."""
        own = sorted({key for step in self.steps for key in step.own})
        waits = sorted({key for step in self.steps for key in step.waits})
        return {
            "steps": [step.number for step in self.steps],
            "own": [
                [phase, module, [_us(step.own.get((phase, module), 0)) for step in self.steps]]
                for phase, module in own
            ],
            "waits": [
                [name, [_us(step.waits.get(name, _NONE)) for step in self.steps]] for name in waits
            ],
        }

    @classmethod
    def of(cls, value: dict[str, Any]) -> OwnTimes:
        """Return what ``value()`` was made of.

        Raises:
            KeyError, TypeError, ValueError: if ``value`` is no such value.
        """
        steps = [Step(number=int(number)) for number in value["steps"]]
        for phase, module, column in value["own"]:
            for step, us in zip(steps, column, strict=True):
                if us:
                    step.own[Phase(phase), str(module)] = us / 1e6
        for name, column in value["waits"]:
            for step, us in zip(steps, column, strict=True):
                if us >= 0:
                    step.waits[str(name)] = us / 1e6
        return cls(steps=tuple(steps))


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


class OwnTimesReader:
    """Reads time stamps in order: which phase it is, and which step.

    [Note: the end of a step] A step ends with a step of an optimizer. Another optimizer's may
    follow, and saves: these belong to the step, too. So a step ends when the next forward begins.

    [Note: between] The time between the end of a forward, a backward or an optimizer's step and the
    next time stamp belongs to the loss, to input, or to the optimizer. The next time stamp decides.
    """

    def __init__(self) -> None:
        """Start between two steps."""
        self._steps: list[Step] = []
        self._whole = True  # whether time stamps of the present step are there from its beginning
        self._last = 0
        self._number = 0
        self._reset()

    def _reset(self) -> None:
        self._step = Step()
        self._stepped = False  # see [Note: the end of a step]
        self._forwards: list[str] = []
        self._backward: str | None = None
        self._waits: list[str] = []
        self._works = 0  # that began and did not end, in a wait or not
        self._files: list[str] = []
        self._in_optimizer = False
        self._after_forward = False
        self._between = 0.0  # see [Note: between]

    def read(self, taken: Taken) -> None:
        """Read what a timeline kept since the last call."""
        if not taken.whole:  # what came before the oldest one is lost
            self._reset()
            self._whole = False
            self._last = taken.stamps[0][0]
        ended = sum(kind == Mark.STEP_ENDED for _, kind, _ in taken.stamps)
        self._number = taken.optimizer_steps - ended
        for time, kind, name in taken.stamps:
            self._take(time, kind, name)

    def skip_to(self, time: int) -> None:
        """Count nothing up to ``time``, in nanoseconds."""
        self._last = time

    def steps(self) -> OwnTimes:
        """Return the steps that are over, once.

        The last one may be over but for files that are written after it; these then belong to the
        next step.
        """
        if not (self._waits or self._files or self._in_optimizer):
            self._close()
        steps, self._steps = self._steps, []
        return OwnTimes(steps=tuple(steps))

    def _take(self, time: int, kind: str, name: str) -> None:
        self._add((time - self._last) / _SECOND)
        self._last = time
        if kind in _WAITS:
            self._waits.append(name if kind == Mark.WAIT else f"{kind} {name}")
        elif kind == Mark.WAIT_ENDED:
            del self._waits[-1:]
        elif kind == Mark.WORK:
            self._works += 1
        elif kind == Mark.WORK_ENDED:
            self._works = max(self._works - 1, 0)  # the watch may have begun in it
        elif kind == Mark.FILES:
            self._files.append(name)
        elif kind == Mark.FILES_ENDED:
            del self._files[-1:]
        elif kind == Mark.STEP:
            self._begin_optimizer()
        elif kind == Mark.STEP_ENDED:
            self._end_optimizer()
        elif kind == EventKind.PRE_FORWARD:
            self._begin_forward(name)
        elif kind == EventKind.POST_FORWARD:
            self._end_forward(name)
        elif kind == EventKind.PRE_BACKWARD:
            self._begin_backward(name)
        elif kind == Mark.BACKWARD_ENDED:
            self._backward, self._after_forward = None, False

    def _add(self, seconds: float) -> None:
        """Add the time since the mark before to what it belongs to."""
        step = self._step
        if self._waits and not self._works:
            step.waits[self._waits[0]] += seconds
        elif self._files:
            step.own[Phase.FILES, self._files[0]] += seconds
        elif self._in_optimizer:
            step.own[Phase.OPTIMIZER, "step"] += seconds
        elif self._backward is not None:
            step.own[Phase.BACKWARD, self._backward] += seconds
        elif self._forwards:
            step.own[Phase.FORWARD, self._forwards[-1]] += seconds
        else:
            self._between += seconds

    def _assign(self, phase: Phase, module: str) -> None:
        """Add the time since the last time stamp to a phase."""
        if self._between:
            self._step.own[phase, module] += self._between
            self._between = 0.0

    def _begin_forward(self, name: str) -> None:
        if self._backward is not None:
            return  # a recomputation
        if name in self._forwards:  # an exception ended the one before
            del self._forwards[self._forwards.index(name) :]
        if not self._forwards:
            self._close()
            self._assign(Phase.INPUT, "")
        self._after_forward = False
        self._forwards.append(name)

    def _end_forward(self, name: str) -> None:
        if self._backward is None and name in self._forwards:
            del self._forwards[self._forwards.index(name) :]
            self._after_forward = not self._forwards

    def _begin_backward(self, name: str) -> None:
        if self._backward is None:
            loss = self._after_forward
            self._assign(*((Phase.FORWARD, "loss") if loss else (Phase.BACKWARD, name)))
        self._forwards.clear()
        self._backward = name

    def _begin_optimizer(self) -> None:
        self._assign(Phase.OPTIMIZER, "before the step")
        self._forwards.clear()
        self._backward = None
        self._in_optimizer = True

    def _end_optimizer(self) -> None:
        self._in_optimizer = self._after_forward = False
        self._number += 1
        self._stepped, self._step.number = True, self._number

    def _close(self) -> None:
        """End the step, if an optimizer has stepped."""
        if self._stepped:
            if self._whole:
                self._steps.append(self._step)
            self._whole, self._stepped, self._step = True, False, Step()
