"""How late the asynchronous device runs its work: seeds, delays, and streams that are held back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from support.device.building import extension
from support.device.loading import load


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How work is delayed.

    Attributes:
        seed: what all delays are drawn from, for each stream apart.
        delay_us: the longest sleep before a piece of work; one in four sleeps.
        held: the part of its time in which a stream runs nothing until the host, or a stream that
            runs, waits for it. With 1 everything runs as late as it can.
        quiet_ms: held work also runs once the host has queued nothing for so long, or a host that
            waits for another rank would wait for ever.
    """

    seed: int = 0
    delay_us: float = 0.0
    held: float = 0.0
    quiet_ms: float = 30.0


def pace_of(seed: int) -> Pace:
    """Return one of several kinds of delays, with its draws, by a number."""
    kinds = (
        Pace(held=1.0),
        Pace(held=0.5),
        Pace(held=0.2, delay_us=100),
        Pace(delay_us=100),
    )
    kind = kinds[seed % len(kinds)]
    return Pace(seed=seed, delay_us=kind.delay_us, held=kind.held)


@contextmanager
def paced(pace: Pace) -> Iterator[None]:
    """Delay work as told inside the ``with`` block, which ends when all of it has run."""
    module, native = load(), extension()
    before = native.pace()
    module.synchronize()
    native.set_pace(pace.seed, pace.delay_us, pace.held, pace.quiet_ms)
    try:
        yield
        for index in range(module.device_count()):
            module.synchronize(index)
    finally:
        native.set_pace(*before)
