"""The orderings that make a line of the engine redundant, looked at while a program runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from fullshard.comm import CommStreams
from fullshard.comm.collectives.replicas import AllReduceInFlight
from fullshard.preflight.simulation.streams import Clock, Machine


def _told(place: Any, name: str, tell: Callable[..., object]) -> Any:
    """A patch after which ``tell`` is called with the arguments of each call, when that is over."""
    method = getattr(place, name)

    def spied(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        tell(*args, **kwargs)
        return result

    return patch.object(place, name, spied)


def _within(clock: Clock, other: Clock) -> bool:
    return all(other.get(number, 0) >= time for number, time in clock.items())


@contextmanager
def gather_after_current() -> Iterator[list[bool]]:
    """Whether each piece of work of the gather stream comes after what gathers are to wait for.

    That is what the current stream, or the event in its place, held when gathers were last told to
    wait.
    """
    found, machines, awaited = list[bool](), list[Machine](), Clock()

    def synchronized(streams: CommStreams, event: Any = None) -> None:
        awaited.clear()
        awaited.update(machines[-1].current().clock if event is None else event.clock)

    def begun(machine: Machine, actor: Any) -> None:
        machines[:] = [machine]
        if actor.name == "gather":
            found.append(bool(awaited) and _within(awaited, actor.clock))

    with ExitStack() as stack:
        stack.enter_context(_told(CommStreams, "synchronize_with_current", synchronized))
        stack.enter_context(_told(Machine, "begin", begun))
        yield found


@contextmanager
def all_reduce_after_reduction() -> Iterator[list[bool]]:
    """Whether the end of each all-reduce comes after the end of its reduce-scatter."""
    found: list[bool] = []

    def waited(flight: Any) -> None:
        first, second = flight._reduction.event.clock, flight._event.clock
        found.append(bool(first) and _within(first, second))

    with _told(AllReduceInFlight, "wait", waited):
        yield found
