"""Debug mode: no collective is launched before all its ranks are known to come to the same one.

Owns whether it is on, for which rank of this process, and what it does before a collective. A rank
is known by its default process group, as ranks may be threads, and a backward may run on another
thread than the one that turned debug mode on. ``desync`` owns how ranks compare their collectives.

[Note: poison] While debug mode is on, the memory of full parameters that ranks share reads as NaN,
once it was given back: all its bits are 1. Gradients that were computed from it are found here.
"""

from __future__ import annotations

import atexit
import functools
import math
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fullshard.comm import Event, EventKind, observe
from fullshard.comm.spi import CHECKS, Launch, default_store
from fullshard.insight.desync import DesyncDetector

__all__ = [
    "debug_mode",
    "is_debugging",
    "leave_collectives",
    "resume_collectives",
    "set_debug_mode",
]

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TIMEOUT = 120.0  # seconds; well below the 10 minutes of NCCL and the 30 of gloo


@dataclass(eq=False)
class _Debugged:
    """A rank on which debug mode is or was on: the timeouts of its contexts, outermost first."""

    desync_detector: DesyncDetector
    contexts: list[float] = field(default_factory=list)
    whole: float | None = None

    @property
    def timeout(self) -> float | None:
        """The timeout in seconds, from the innermost context; None if debug mode is off."""
        return self.contexts[-1] if self.contexts else self.whole


_debugged: weakref.WeakKeyDictionary[dist.ProcessGroup, _Debugged] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # a world may be freed while it is held
_at_exit = functools.cache(atexit.register)  # each function once
_attached = ExitStack()  # what is there while debug mode is on for any rank of this process


def _here() -> _Debugged | None:
    """The rank of this thread, if debug mode is on."""
    world = dist.group.WORLD if _meet in CHECKS else None
    here = None if world is None else _debugged.get(world)
    return None if here is None or here.timeout is None else here


def _here_at_last(timeout: float) -> _Debugged:
    """The rank of this thread, on which debug mode is about to be turned on."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is a {type(timeout).__name__}; pass seconds as a number")
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout is {timeout}; pass a finite number of seconds above 0")
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError(
            "debug mode was turned on before torch.distributed.init_process_group(); call that "
            "first, as ranks compare their collectives through its store"
        )
    with _lock:
        found = _debugged.get(world)
        if found is None:
            detector = DesyncDetector(default_store(), dist.get_rank(), dist.get_world_size())
            found = _debugged[world] = _Debugged(detector)
            weakref.finalize(world, _attach)  # a destroyed world leaves nothing behind
            _at_exit(_say_that_it_ends)
    if found.timeout is None:
        found.desync_detector.begin()
    return found


def _say_that_it_ends() -> None:
    """Tell ranks that wait for this one, if debug mode is on, that its program has ended."""
    if here := _here():
        here.desync_detector.depart("has ended its program")


def _attach() -> None:
    """Attach debug mode to collectives and events, or detach it if no rank needs it."""
    with _lock:
        needed = any(each.timeout is not None for each in _debugged.values())
        if needed and _meet not in CHECKS:
            CHECKS.append(_meet)
            _attached.callback(CHECKS.remove, _meet)
            _attached.enter_context(observe(_Resets()))
        elif not needed:
            _attached.close()


@contextmanager
def debug_mode(*, timeout: float = _TIMEOUT) -> Iterator[None]:
    """A context in which this rank compares each collective with the other ranks' before launch.

    Enter it on every rank, at the same place of the program. If ranks call different collectives,
    or a rank does not call any, every rank raises ``CollectiveMismatchError`` and nothing is
    launched. The error reports the position of each rank. An exception that leaves the context on
    one rank is part of the others' report at once. Ranks wait for one another at each collective,
    so the host's overlap is lost; the computed values stay bitwise equal. Contexts nest; the
    innermost timeout counts.

    Args:
        timeout: seconds that ranks wait for the last to come; below the process group's own, above
            what a slow rank needs between two collectives (to compile, or to save a checkpoint).

    Raises:
        TypeError: if ``timeout`` is no number.
        ValueError: if it is not above 0 and finite.
        RuntimeError: if ``torch.distributed`` is not initialised.
    """
    here = _here_at_last(timeout)
    here.contexts.append(timeout)
    _attach()
    try:
        yield
    except BaseException as error:
        here.desync_detector.depart(_reason(error))
        raise
    finally:
        here.contexts.pop()
        _attach()


def set_debug_mode(enabled: bool, *, timeout: float = _TIMEOUT) -> None:
    """Turn debug mode on or off for this rank until further notice; as ``debug_mode``.

    Call it on every rank at the same place. A rank whose program ends notifies the other ranks. For
    a killed rank, ranks of its host notice the end at once, and ranks of other hosts after the
    timeout.

    Raises:
        TypeError: if ``enabled`` is no bool or ``timeout`` no number.
        ValueError: if ``timeout`` is not above 0 and finite.
        RuntimeError: if ``torch.distributed`` is not initialised.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled is a {type(enabled).__name__}; pass True or False")
    if enabled:
        _here_at_last(timeout).whole = timeout
    elif here := _here():
        here.whole = None
    _attach()


def is_debugging() -> bool:
    """Whether debug mode is on for the rank of this thread."""
    return _here() is not None


def _meet(
    launch: Launch,
    process_group: dist.ProcessGroup,
    gradients: Iterable[torch.Tensor | None],
) -> None:
    """Return once every rank came to the same collective, if debug mode is on."""
    here = _here()
    if here is not None and here.timeout is not None:
        _require_unpoisoned(gradients, launch.name)
        here.desync_detector.meet(launch, process_group, here.timeout)


class _Resets:
    """An observer by which ranks restart their counts together."""

    def on_event(self, event: Event) -> None:
        """Take note of a root that raised, or that is reset."""
        if event.kind is EventKind.ABANDONED:
            leave_collectives(sys.exception())
        elif event.kind is EventKind.RESET:
            resume_collectives()


def _require_unpoisoned(gradients: Iterable[torch.Tensor | None], name: str) -> None:
    """Return if no gradient was computed from poison.

    Arithmetic keeps the bits of a NaN in fp32 and fp64, so the check can tell poison from other
    NaNs. Narrower dtypes round, and may lose them.

    Args:
        gradients: full gradients of this rank.
        name: the group of parameters whose gradients they are.

    Raises:
        RuntimeError: if one holds poison.
    """
    for number, gradient in enumerate(gradients):
        if gradient is None or not gradient.is_floating_point():
            continue
        bits = gradient.detach().view(_SAME_SIZE[gradient.dtype.itemsize])
        if bool((bits == -1).any()):
            raise RuntimeError(
                f"got a gradient of {name or '(root)'} (parameter {number} of the group) that was "
                "computed from full parameters after their memory was given back, where debug mode "
                "puts NaN; expected full parameters to be read only while their module is gathered."
                " Do not keep a full parameter, a view of it or a tensor over it beyond the forward"
                " that used it; to read it later, enter unsharded(module)"
            )


def leave_collectives(error: BaseException | None = None) -> None:
    """Notify the other ranks that this rank left its operation; do nothing if debug mode is off.

    The other ranks raise an error and stop waiting for this rank; all ranks then restart their
    count of collectives.

    Args:
        error: why; None if that is not known.
    """
    if here := _here():
        here.desync_detector.depart(_reason(error))


def resume_collectives() -> None:
    """Let this rank continue after a ``CollectiveMismatchError``; do nothing if there was none.

    Until it is called, on each rank that raised, every collective raises the error again, so that a
    rank on its way out of a program does not start the next meeting by accident. Leaving
    ``debug_mode()`` by an exception does it too.
    """
    if here := _here():
        here.desync_detector.resume()


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "gave up what it was doing"
    lines = str(error).strip().splitlines()
    return f"raised {type(error).__name__}{': ' + lines[0] if lines else ''}"
