"""Raise one rank's error on all ranks, before any rank waits for a rank that has left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist

from fullshard.comm import CollectiveMismatchError
from fullshard.preflight.compat import DispatchMode, default_store

__all__ = ["Alone", "everyones", "from_first", "jointly", "raise_together"]

_T = TypeVar("_T")

PATIENCE = 20.0
"""Seconds that a rank with an error gives the others to come to its end of the same part."""

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")

_parts = count()  # all ranks pass equal parts in one order


def everyones(value: _T) -> list[_T]:
    """Return what each rank passed, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def from_first(value: _T, rank: int = 0) -> _T:
    """Return what rank 0 passed, or ``rank``."""
    box = [value]
    dist.broadcast_object_list(box, src=rank)
    return box[0]


def raise_together(run: Callable[[], _T]) -> _T:
    """Return ``run()``, in which no rank may communicate.

    Raises:
        Exception: what ``run`` raised here; or a ``RuntimeError`` that names the rank where it did.
    """
    value, failure = _tried(run)
    told = everyones(None if failure is None else _text(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text is not None:
            raise RuntimeError(_stopped(rank, text))
    return value


def jointly(run: Callable[[], _T]) -> _T:
    """Return ``run()``, in which ranks may communicate with each other.

    The ranks report through the store how they ended, without a collective: a rank that raised may
    have left one that others are in. The failed rank waits a while for the others, and then raises
    alone. Their wait ends when its process does: gloo sees the closed connection, and they raise
    with its error; torchrun ends them with other backends.

    Raises:
        Exception: the error of ``run`` on this rank, if no other rank raised another error before;
            or a ``RuntimeError`` that names the other rank.
    """
    part = _Part(next(_parts))
    value, failure = _tried(run)
    if failure is None:
        part.end()
        part.wait_for_all()
    else:
        part.fail(_text(failure), repeats=isinstance(failure, CollectiveMismatchError))
        part.wait_for_all(PATIENCE)
    if told := part.failure():
        if failure is not None and told[1] == _text(failure):
            raise failure
        raise RuntimeError(_stopped(*told)) from failure  # a failure here came of that rank's
    return value


def _tried(run: Callable[[], _T]) -> tuple[_T, None] | tuple[Any, Exception]:
    """Return the result of ``run``, or the error that it raised."""
    try:
        return run(), None
    except Exception as error:
        return None, error


def _text(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


def _stopped(rank: int, text: str) -> str:
    return f"rank {rank} stopped the verification: {text}"


class Alone(DispatchMode):
    """A context for what one rank alone runs: a collective in it raises instead of waiting."""

    def __init__(self, what: str = "the unsharded model, or its loss,", instead: str = "") -> None:
        """Prepare the error: ``what`` runs alone, and what to do ``instead`` of a collective."""
        super().__init__()
        self._what = what
        self._instead = instead or (
            "Compute what ranks share, such as a number of tokens, in batch, which all of them "
            "call, or pass tokens=; split the model in shard"
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation.

        Raises:
            RuntimeError: if it is a collective.
        """
        if func.namespace in _COLLECTIVES:
            raise RuntimeError(
                f"{self._what} called {func.name()}, a collective, and rank 0 runs it alone. "
                f"{self._instead}"
            )
        return func(*args, **(kwargs or {}))


class _Part:
    """A record, outside of the collectives, of ranks that ended a part, and of the first error.

    An error that repeats the error of another rank counts only if no rank has an error of its own.
    The record is in the store of the process group.
    """

    def __init__(self, number: int) -> None:
        self._world, self._rank = dist.get_world_size(), dist.get_rank()
        self._store = default_store()
        self._ended, self._all, self._own, self._repeated = (
            f"fullshard.preflight/{number}/{what}" for what in ("ended", "all", "own", "repeated")
        )

    def end(self) -> None:
        """Write that this rank ended."""
        if self._store.add(self._ended, 1) == self._world:
            self._store.set(self._all, "")

    def fail(self, text: str, *, repeats: bool) -> None:
        """Write that this rank ended with an error, or with one that ``repeats`` another rank's."""
        kind = self._repeated if repeats else self._own
        if self._store.add(f"{kind}/ranks", 1) == 1:
            self._store.set(kind, f"{self._rank} {text}")
        self.end()

    def failure(self) -> tuple[int, str] | None:
        """Return which rank was the first with an error, and its text; None if none was."""
        for kind in (self._own, self._repeated):
            if self._store.check([f"{kind}/ranks"]):
                rank, _, text = self._store.get(kind).decode().partition(" ")  # waits until set
                return int(rank), text
        return None

    def wait_for_all(self, patience: float | None = None) -> None:
        """Wait for all ranks to end, ``patience`` seconds; None: or until one has an error.

        An error that repeats another's ends the wait of None after ``PATIENCE`` seconds.
        """
        end = math.inf if patience is None else time.monotonic() + patience
        pause = 1e-4
        while not self._store.check([self._all]) and time.monotonic() < end:
            if patience is None and self._store.check([f"{self._own}/ranks"]):
                return
            if end == math.inf and self._store.check([f"{self._repeated}/ranks"]):
                end = time.monotonic() + PATIENCE
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
