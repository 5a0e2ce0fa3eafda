"""A step's launches put in time on one device: when each begins and ends, and who waits for whom.

Owns the clock: the host launches one operation after the other; an operation begins when it is
launched, its stream is free and all that it is ordered after is over. A step begins with idle
streams, so a host that runs ahead into the next step gains nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fullshard.preflight.costs.collectives import Traffic, collective_seconds, traffic_of
from fullshard.preflight.costs.devices import Device
from fullshard.preflight.costs.kernels import Kernel, kernel_seconds
from fullshard.preflight.planning.recorder import Collective, HostWait, Launch

__all__ = ["Costs", "Described", "Span", "Timeline", "replay"]

_COMPUTE = 1


class Costs(Protocol):
    """How long things take on a device."""

    @property
    def device(self) -> Device:
        """The device."""
        ...

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of a kernel."""
        ...

    def collective(self, collective: Collective) -> float:
        """Seconds of a collective."""
        ...


@dataclass(frozen=True)
class Described:
    """The costs that follow from a description of the device."""

    device: Device

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of a kernel, by its roofline."""
        return kernel_seconds(kernel, self.device)

    def collective(self, collective: Collective) -> float:
        """Seconds of a collective, by latency and bandwidth."""
        name, nbytes, axis = collective.name, collective.nbytes, collective.axis
        return collective_seconds(name, nbytes, axis, self.device)


@dataclass(frozen=True, slots=True)
class Span:
    """A launch in time.

    Attributes:
        launch: what it is.
        start: seconds since the step began.
        end: seconds since the step began.
    """

    launch: Launch
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step in time.

    Attributes:
        device: on what.
        streams: the names of the streams that were used, by number.
        spans: what ran, in the order in which it was launched.
        step_time: seconds of the whole step.
        exposed: seconds in which nothing is computed, for a collective is waited for.
        host_bound: seconds in which nothing is computed, for the host has not launched it yet.
        flops: FLOPs of matrix products and attention, without what is computed again.
        traffic: what this rank sends, by axis and link.
    """

    device: Device
    streams: Mapping[int, str]
    spans: tuple[Span, ...]
    step_time: float
    exposed: float
    host_bound: float
    flops: int
    traffic: Mapping[tuple[int, str], Traffic]

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al. 2022): of the device's peak in the step."""
        dtypes = [
            (each.launch.work.flops, each.launch.work.dtype)
            for each in self.spans
            if isinstance(each.launch.work, Kernel) and each.launch.work.flops
        ]
        if not dtypes:
            return 0.0
        peak = self.device.peak(max(dtypes, key=lambda pair: pair[0])[1])
        return self.flops / (self.step_time * peak)

    @property
    def by_bytes_alone(self) -> tuple[str, ...]:
        """Operators of unknown work, timed as if they only read and wrote their operands."""
        kernels = (each.launch.work for each in self.spans if isinstance(each.launch.work, Kernel))
        return tuple(sorted({each.name for each in kernels if each.by_bytes_alone}))

    def save(self, path: str | Path) -> None:
        """Writes a Chrome trace with a row for each stream, which Perfetto opens."""
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}
            for number, name in self.streams.items()
        ]
        events += [_event(each) for each in self.spans]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        """A table for a person."""
        lines = [
            f"{1e3 * self.step_time:.2f} ms a step on {self.device.name}, of which"
            f" {1e3 * self.exposed:.2f} ms wait for collectives and"
            f" {1e3 * self.host_bound:.2f} ms for the host",
            f"  {100 * self.utilisation:.1f} % of the FLOP/s at most (MFU)",
        ]
        for (size, _), sent in self.traffic.items():
            lines.append(
                f"  sends {sent.nbytes / 2**20:.1f} MiB in {sent.messages} messages over"
                f" {sent.link}, among {size} ranks"
            )
        lines.append(f"  {self.device.efficiency}")
        if self.by_bytes_alone:
            named = ", ".join(self.by_bytes_alone)
            lines.append(f"  timed by their bytes alone, since their FLOPs are not known: {named}")
        return "\n".join(lines)


def replay(
    records: Iterable[Launch | HostWait], streams: Mapping[int, str], costs: Costs
) -> Timeline:
    """Puts what a step launched in time."""
    device, host, exposed, host_bound = costs.device, 0.0, 0.0, 0.0
    ends: dict[tuple[int, int], float] = {}
    free = dict.fromkeys(streams, 0.0)
    spans, flops = [], 0
    sent: dict[tuple[int, str], Traffic] = {}
    for record in records:
        over = max((ends.get(each, 0.0) for each in record.after.items()), default=0.0)
        if isinstance(record, HostWait):
            host = max(host, over)
            continue
        host += device.launch
        start = max(host, free[record.stream], over)
        if isinstance(record.work, Kernel):
            end = start + costs.kernel(record.work)
            flops += 0 if record.again else record.work.flops
        else:
            end = start + costs.collective(record.work)
            _send(sent, record.work, device)
        if record.stream == _COMPUTE:
            waits = max(0.0, over - max(free[_COMPUTE], host))
            exposed += waits
            host_bound += start - free[_COMPUTE] - waits
            if device.synchronous:
                host = end
        ends[record.stream, record.number] = end
        free[record.stream] = end
        spans.append(Span(record, start, end))
    step_time = max((*free.values(), host), default=0.0)
    exposed += max(0.0, step_time - max(free[_COMPUTE], host))
    return Timeline(
        device=device,
        streams={number: streams[number] for number in sorted({s.launch.stream for s in spans})},
        spans=tuple(spans),
        step_time=step_time,
        exposed=exposed,
        host_bound=host_bound,
        flops=flops,
        traffic=sent,
    )


def _send(sent: dict[tuple[int, str], Traffic], moved: Collective, device: Device) -> None:
    more = traffic_of(moved.name, moved.nbytes, moved.axis, device)
    key = (moved.axis.size, more.link)
    before = sent.get(key, Traffic(more.link, 0.0, 0))
    sent[key] = Traffic(more.link, before.nbytes + more.nbytes, before.messages + more.messages)


def _event(span: Span) -> dict[str, object]:
    launch, work = span.launch, span.launch.work
    about: dict[str, object] = {"place": str(launch.place), "bytes": work.nbytes}
    if isinstance(work, Kernel):
        about["FLOPs"] = work.flops
    else:
        about["ranks"] = work.axis.size
    return {
        "name": work.name.removeprefix("aten::"),
        "cat": "kernel" if isinstance(work, Kernel) else "collective",
        "ph": "X",
        "pid": 0,
        "tid": launch.stream,
        "ts": 1e6 * span.start,
        "dur": 1e6 * (span.end - span.start),
        "args": about,
    }
