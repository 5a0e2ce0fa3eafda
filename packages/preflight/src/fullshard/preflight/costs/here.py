"""This machine as a device: costs of single operations and collectives, measured when first asked.

Decides what to measure for a plan, with how many concurrent ranks, and what to keep: in this
process, and in a file that a user names. Refuses to time steps: a step is added up from single
operations.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from math import prod
from pathlib import Path

import torch

from fullshard.preflight.costs.call import Call, Items, Operand
from fullshard.preflight.costs.collectives import Collective
from fullshard.preflight.costs.devices import Device, Efficiency, Link
from fullshard.preflight.costs.host import HostTime
from fullshard.preflight.costs.kernels import Kernel, kernel_seconds
from fullshard.preflight.costs.links import Links
from fullshard.preflight.costs.memo import memo_of
from fullshard.preflight.costs.pages import Allocations, fits_here
from fullshard.preflight.costs.ranks import Job, Times, measure_together
from fullshard.preflight.costs.timing import COLLECTIVES, Moved
from fullshard.preflight.machine import usable_cores
from fullshard.sharding.spi import require_count

__all__ = ["UNSHARD", "Here", "MeasuredCosts"]

UNSHARD = "fullshard::unshard"
"""The name under which the engine's own host time is recorded, each time a group is gathered."""
_RANKS_PER_CORE = 16
_SIDE, _LONG = 1024, 2**24  # of a matrix, of a vector: sizes for the machine's peaks


def _floats(*shape: int) -> Operand:
    stride = tuple(prod(shape[place + 1 :]) for place in range(len(shape)))
    return Operand(shape, stride, torch.float32)


_MATRIX, _VECTOR = _floats(_SIDE, _SIDE), _floats(_LONG)
_PRODUCT = Call("aten::mm", "", Items((_MATRIX, _MATRIX), is_list=True), ())
_COPY = Call("aten::copy_", "", Items((_VECTOR, _VECTOR), is_list=True), ())


@dataclass(frozen=True, kw_only=True)
class Here:
    """This machine's CPU, as the device of a plan.

    An operation or collective of a plan is measured once, in processes that start when the plan
    knows it: as many as the mesh has ranks, all at once. Attention and all else are the CPU's own
    kernels.

    Attributes:
        threads: of each rank's operations; None: the cores shared out evenly, at least one.
        ranks: how many measure operations at once, if not all of the mesh's: as many as run on one
            host.
        links: collectives as ``measure_links`` found them between the ranks of a real process
            group, on several hosts, say; None: between processes of this host.
        cache: a file that keeps what was measured, for the next plan on this machine.
    """

    threads: int | None = None
    ranks: int | None = None
    links: Links | None = None
    cache: str | Path | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            TypeError: if one is no int.
            ValueError: if one is below 1.
        """
        for name in ("threads", "ranks"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))


def _rounded(nbytes: int) -> int:
    """The power of four next above."""
    rounded = 1
    while rounded < nbytes:
        rounded *= 4
    return rounded


class MeasuredCosts:
    """Costs on this machine for a mesh, which ``measure`` measures before a plan reads them.

    Args:
        here: what the user asked for.
        sizes: of the mesh's axes.

    Raises:
        ValueError: if so many ranks cannot measure on this machine, or the links are between
            another number of ranks.
    """

    def __init__(self, here: Here, sizes: tuple[int, ...]) -> None:
        """Measure nothing yet."""
        ranks, cores = prod(sizes), usable_cores()
        if here.links is not None and ranks > 1 and here.links.ranks not in sizes:
            raise ValueError(
                f"links were measured among {here.links.ranks} ranks, and the mesh {sizes} has no "
                "axis of as many; call measure_links() in a process group of the mesh's size"
            )
        at_once = here.ranks or ranks
        if at_once > cores * _RANKS_PER_CORE:
            raise ValueError(
                f"a mesh of {ranks} ranks would be measured by {at_once} processes at once, on "
                f"{cores} cores; pass device=Here(ranks=...) with the ranks of one host and links= "
                "between them, or a described device"
            )
        self._links = here.links
        self._ranks, self._at_once = ranks, at_once
        self._threads = here.threads or max(1, cores // at_once)
        self._memo = memo_of(here.cache, f"{at_once} ranks, {self._threads} threads")
        self._device: Device | None = None
        self._by_bytes: set[str] = set()
        self._host = HostTime(0.0, 0.0)
        self._pages = 0.0
        self._launch = 0.0

    @property
    def device(self) -> Device:
        """The description of this machine.

        Raises:
            AssertionError: before anything was measured.
        """
        assert self._device is not None, "measure() comes first"
        return self._device

    def measure(
        self,
        kernels: Iterable[Kernel],
        moves: Iterable[Collective],
        parameters: int,
        allocations: Allocations,
    ) -> None:
        """Measure what is not known yet.

        Args:
            kernels: the operations of a step.
            moves: its collectives.
            parameters: of a group, on average.
            allocations: of the step.

        Raises:
            RuntimeError: if a process that measures fails.
            ValueError: if there is a collective that cannot be measured.
        """
        kernels = list(kernels)
        moves = (
            [] if self._links is not None else list({str(each): each for each in moves}.values())
        )
        self._check(moves)
        called = dict.fromkeys(each.call for each in kernels if each.call is not None)
        calls = [each for each in (_PRODUCT, _COPY, *called) if str(each) not in self._memo]
        moves = [each for each in moves if str(each) not in self._memo]
        touched = _rounded(sum(each.nbytes for each in kernels) // len(kernels))
        host = f"groups of {parameters} parameters among {self._ranks}, {touched} bytes touched"
        asked = 0 if host in self._memo else parameters
        if calls or moves or asked:
            times = self._times(calls, moves, asked, touched)
            found: dict[str, tuple[float, ...]] = {}
            for call, seconds in zip(calls, times.calls, strict=True):
                found[str(call)] = () if seconds is None else (seconds,)
            found |= {str(m): astuple(t) for m, t in zip(moves, times.moves, strict=True)}
            if times.host is not None:
                found[host] = astuple(times.host)
            self._memo.add(found)
        self._host = HostTime(*self._memo[host])
        self._by_bytes = {
            each.name for each in kernels if each.nbytes and self._seconds(each) is None
        }
        self._pages = self._new_pages(allocations)
        operations = sum(1 for each in kernels if each.name != UNSHARD)
        self._launch = self._host.launch + self._pages / operations
        self._device = self._described(len(called))

    def _new_pages(self, allocations: Allocations) -> float:
        """Seconds of a step for new memory pages; 0 if a step is too large to try that here."""
        if not fits_here(allocations.most() * self._at_once):
            return 0.0
        key = str(allocations)
        if key not in self._memo:
            job = Job(ranks=self._at_once, threads=1, world=self._ranks, allocations=allocations)
            self._memo.add({key: (measure_together(job).pages,)})
        return self._memo[key][0]

    def _seconds(self, kernel: Kernel) -> float | None:
        """Return the measured seconds of an operation; None if it could not be called by itself."""
        found = () if kernel.call is None else self._memo[str(kernel.call)]
        return found[0] if found else None

    def _check(self, moves: list[Collective]) -> None:
        unknown = sorted({each.name for each in moves} - set(COLLECTIVES))
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)} cannot be measured here; use collectives among "
                f"{', '.join(sorted(COLLECTIVES))}, or a described device"
            )

    def _times(
        self, calls: list[Call], moves: list[Collective], parameters: int, touched: int
    ) -> Times:
        """What was measured: together, or collectives by ranks of their own if they are more."""
        job = Job(
            ranks=self._at_once, threads=self._threads, world=self._ranks, calls=calls, moves=moves,
            parameters=parameters, touched=touched,
            share_cores=self._at_once * self._threads > usable_cores(),
        )  # fmt: skip
        if not moves or self._at_once == self._ranks:
            return measure_together(job)
        apart = measure_together(replace(job, ranks=self._ranks, calls=(), parameters=0))
        return replace(measure_together(replace(job, moves=())), moves=apart.moves)

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of an operation, and of what modules and autograd add to it."""
        if kernel.name == UNSHARD:
            return self._host.unshard
        seconds = self._seconds(kernel)
        if seconds is None:
            seconds = kernel_seconds(kernel, self.device) if kernel.nbytes else 0.0
        return seconds + self._launch

    def moved(self, move: Collective) -> Moved:
        """Return the cost of a collective."""
        if self._links is not None:
            return self._links.moved(move.name, move.nbytes)
        return Moved(*self._memo[str(move)])

    def _described(self, operations: int) -> Device:
        (product,), (copy,) = self._memo[str(_PRODUCT)], self._memo[str(_COPY)]
        where = "processes of this machine" if self._links is None else "a real process group"
        told = (
            f"measured on this machine: {operations} single operations by {self._at_once} ranks at "
            f"once with {self._threads} threads each, collectives between {where}; "
            f"{1e6 * self._host.launch:.1f} us of modules and autograd for each operation, "
            f"{1e6 * self._host.unshard:.0f} us of the engine for each gather of a group, "
            f"{1e3 * self._pages:.1f} ms a step for new memory pages"
        )
        if self._by_bytes:
            told += f"; by their bytes alone: {', '.join(sorted(self._by_bytes))}"
        link = Link(
            name="this machine", bandwidth=2 * 4 * _LONG / copy, latency=0.0, short_latency=0.0,
            tree_latency=0.0, short_tree_latency=0.0,
        )  # fmt: skip
        return Device(
            name="here",
            flops={torch.float32: 2 * _SIDE**3 / product},
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / self._at_once,
            bandwidth=2 * 4 * _LONG / copy,
            per_host=self._at_once,
            inside=link,
            between=link,
            attention="the CPU's",
            launch=self._host.launch,
            shortest=0.0,
            start=0.0,
            synchronous=True,
            efficiency=Efficiency(matmul=1.0, attention=1.0, memory=1.0, link=1.0),
            measured=told,
        )
