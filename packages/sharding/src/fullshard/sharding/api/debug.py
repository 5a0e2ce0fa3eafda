"""Debug mode for sharded models: collectives that ranks disagree on, and stale unsharded copies.

Owns only the switch: ``fullshard.comm`` compares ranks, the root tells it when a forward raised or
was reset, and stale copies are ``CopyWatch``'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fullshard.comm import debug_collectives, set_debug_collectives

__all__ = ["debug_mode", "set_debug_mode"]

_TIMEOUT = 120.0


@contextmanager
def debug_mode(*, timeout: float = _TIMEOUT) -> Iterator[None]:
    """A context in which ranks that do different things raise, instead of waiting for ever.

    Before each gather, reduction and all-reduce the ranks compare what they are about to launch:
    which, of whose parameters, how many bytes, in which dtype. Where they differ, or a rank does
    not come, every rank raises ``fullshard.comm.CollectiveMismatchError`` with one report, such as
    "rank 3 gathers layers.17, rank 1 reduces layers.18", and nothing is launched, so that after
    ``reset_iter_state()`` on every rank the program can go on. A rank whose forward raises, or that
    leaves the context by an exception, is part of the others' report at once.

    Also, an unsharded copy that serves a second forward is compared with its shards, by checksum: a
    ``RuntimeError`` names parameters that were changed without ``parameters_changed()``.

    Results stay the same to the last bit. Enter it on every rank at the same place of the program;
    contexts nest, and the innermost timeout counts.

    Args:
        timeout: seconds that ranks wait for the last to come; below the process group's own, above
            what a slow rank needs between two collectives (to compile, or to save a checkpoint).

    Raises:
        TypeError: if ``timeout`` is no number.
        ValueError: if it is not above 0 and finite.
        RuntimeError: if ``torch.distributed`` is not initialised.
    """
    with debug_collectives(timeout=timeout):
        yield


def set_debug_mode(enabled: bool, *, timeout: float = _TIMEOUT) -> None:
    """Turns debug mode on or off until further notice, for this rank; as ``debug_mode``.

    Call it on every rank at the same place of the program. An exception outside a forward that ends
    one rank's program is found by the others after the timeout: inside ``with debug_mode():`` they
    are told.

    Raises:
        TypeError: if ``enabled`` is no bool or ``timeout`` no number.
        ValueError: if ``timeout`` is not above 0 and finite.
        RuntimeError: if ``torch.distributed`` is not initialised.
    """
    set_debug_collectives(enabled, timeout=timeout)
