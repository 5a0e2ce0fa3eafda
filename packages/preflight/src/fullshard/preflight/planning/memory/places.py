"""Where in a training step an operation is: its phase and the module that issued it.

Owns the hooks that tell. An operation of backward belongs to the module whose forward recorded it,
found by the numbers that autograd gives to what it records.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.preflight.compat import backward_number, forward_number

__all__ = ["Place", "Places"]


@dataclass(frozen=True, slots=True)
class Place:
    """A phase of a step, and a module.

    Attributes:
        phase: "construction", "forward", "backward", "optimizer" or "between steps".
        module: its name; "" for the model itself, or for none.
    """

    phase: str
    module: str = ""

    def __str__(self) -> str:
        """Return the text for a report."""
        return f"{self.phase} of {self.module}" if self.module else self.phase


@dataclass(slots=True)
class _Recorded:
    """From which number on autograd recorded operations of which module."""

    numbers: list[int] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def append(self, module: str) -> None:
        self.numbers.append(forward_number())
        self.modules.append(module)

    def of(self, number: int) -> str:
        place = bisect.bisect_right(self.numbers, number) - 1
        return self.modules[place] if place >= 0 else ""


class Places:
    """Knows the phase and the module at any moment of a step.

    Attributes:
        names: the full names of the model's modules, by their ids.
    """

    def __init__(self) -> None:
        self._phase = "construction"
        self._running: list[str] = []
        self._recorded = _Recorded()
        self._failed: Place | None = None
        self.names: dict[int, str] = {}

    def fail(self) -> None:
        """Record the present place: an operation raised here."""
        self._failed = self.now()

    def failed(self) -> Place:
        """Return the place of the last operation that raised; the present place if none did."""
        return self._failed or self.now()

    def now(self) -> Place:
        """The present phase and module."""
        number = backward_number()
        if number is not None:
            self._phase = "backward"
        if self._running:  # also what a checkpoint computes again, in backward
            return Place(self._phase, self._running[-1])
        return Place(self._phase, "" if number is None else self._recorded.of(number))

    @contextmanager
    def followed(
        self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
    ) -> Iterator[None]:
        """Inside the ``with`` block, steps of the model and the optimizers are followed."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                self.names[id(module)] = name
                enter = partial(self._enter, name)  # before what the engine does for the module
                stack.enter_context(module.register_forward_pre_hook(enter, prepend=True))
                stack.enter_context(module.register_forward_hook(self._leave, always_call=True))
            begin, end = partial(self._become, "optimizer"), partial(self._become, "between steps")
            for optimizer in optimizers:
                stack.enter_context(optimizer.register_step_pre_hook(begin))
                stack.enter_context(optimizer.register_step_post_hook(end))
            self._phase = "between steps"
            yield

    def _become(self, phase: str, *_: object) -> None:
        self._phase = phase

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        if backward_number() is None and not self._running:
            self._phase = "forward"
            self._recorded = _Recorded()
        self._running.append(name)
        self._recorded.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:  # else it raised before it was entered
            self._running.pop()
        self._recorded.append(self._running[-1] if self._running else "")
