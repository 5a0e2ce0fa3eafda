"""The engine's events of one step, on one clock that all ranks share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fullshard.comm import EventLog, observe
from fullshard_bench.measuring.rounds import synchronize

__all__ = ["record_events"]


def record_events(step: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Run `step` once; its events, with microseconds since it began. All ranks begin together.

    Times are the host's, when work was queued; on the CPU also the end of the work, except for
    collectives in flight. The last event, `end`, is that of the device having done all.
    """
    synchronize(device)
    log = EventLog()
    start = time.perf_counter_ns()
    with observe(log):
        step()
    synchronize(device)
    end = time.perf_counter_ns()
    events = [
        {
            "kind": event.kind.value,
            "name": event.name,
            "nbytes": event.nbytes,
            "stream": event.stream,
            "us": round((event.time_ns - start) / 1e3, 1),
        }
        for event in log.events
    ]
    whole = round((end - start) / 1e3, 1)
    return [*events, {"kind": "end", "name": "", "nbytes": 0, "stream": "", "us": whole}]
