"""Moments of a join at which a rank stops itself, so that a chosen rank is killed just then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from typing import Any
from unittest import mock

from fullshard.elastic import recovery, state

__all__ = ["MOMENTS", "arm", "stop_at_moments"]

MOMENTS = (
    "before the state is sent",
    "half of the state is sent",
    "the state is sent",
    "half of the state arrived",
    "the state arrived",
    "half of the state is loaded",
    "the state is loaded",
)


def arm(armed: Synchronized[int], moment: str) -> None:
    """Let the first rank that comes to ``moment`` stop itself."""
    armed.value = 1 + MOMENTS.index(moment)


def stop_at_moments(armed: Synchronized[int], tell: Callable[[str], None]) -> None:
    """Patch this process: it tells the armed moment, and stops until SIGCONT.

    Args:
        armed: shared with the process that calls ``arm``.
        tell: called with the moment.
    """

    def reach(moment: str) -> None:
        with armed.get_lock():
            mine = armed.value == 1 + MOMENTS.index(moment)
            if mine:
                armed.value = 0
        if mine:
            tell(moment)
            os.kill(os.getpid(), signal.SIGSTOP)

    def patch(place: Any, name: str, make: Callable[[Any], Any]) -> None:
        mock.patch.object(place, name, make(getattr(place, name))).start()

    def around(before: str | None, after: str | None) -> Callable[[Any], Any]:
        def make(call: Any) -> Any:
            def with_moments(*args: Any, **options: Any) -> Any:
                if before is not None:
                    reach(before)
                result = call(*args, **options)
                if after is not None:
                    reach(after)
                return result

            return with_moments

        return make

    def in_halves(move: Any) -> Any:
        def moved(link: Any, tensors: list[Any], at: int, *, sends: bool) -> Any:
            half = len(tensors) // 2
            works = move(link, tensors[:half], at, sends=sends)
            for work in works:
                work.wait()
            reach(MOMENTS[1] if sends else MOMENTS[3])
            return move(link, tensors[half:], at, sends=sends)

        return moved

    patch(recovery.Recovery, "send", around(MOMENTS[0], None))
    patch(recovery._Link, "move", in_halves)
    patch(recovery, "_send_parts", around(None, MOMENTS[2]))
    patch(recovery, "_receive_parts", around(None, MOMENTS[4]))
    patch(state, "flatten_sharded_optim_state_dict", around(MOMENTS[5], None))
    patch(state.ReplicaState, "load", around(None, MOMENTS[6]))
