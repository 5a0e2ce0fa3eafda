"""The cost of a collective: latency and bandwidth of a ring or a tree over one axis of a mesh.

Owns the formulas: a ring moves a part of the data in each of its steps (Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005), a tree halves the
steps' number; steps between hosts and steps inside a host have different costs, and short messages
get a part of the bandwidth, as in NCCL's tuning (``src/graph/tuning.cc``). Refuses contention:
collectives of several axes that run at once are taken not to disturb each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullshard.preflight.costs.devices import Device

__all__ = ["Axis", "Collective", "Traffic", "collective_seconds", "traffic_of"]


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks of a collective.

    Attributes:
        size: how many ranks.
        stride: how far the next one's number is away.
        name: of the axis of a mesh; of another process group its description.
    """

    size: int
    stride: int = 1
    name: str = ""

    def per_host(self, device: Device) -> int:
        """How many of its ranks one host has."""
        return min(self.size, max(1, device.per_host // self.stride))

    def hosts(self, device: Device) -> int:
        """Over how many hosts it goes."""
        return math.ceil(self.size / self.per_host(device))


@dataclass(frozen=True, slots=True)
class Collective:
    """What moves.

    Attributes:
        name: the operator's, without its namespace.
        nbytes: of an all-gather's output, a reduce-scatter's input, or the tensor.
        axis: among whom.
    """

    name: str
    nbytes: int
    axis: Axis

    @property
    def reduces_all(self) -> bool:
        """Whether it is an all-reduce, which goes round twice."""
        return self.name.startswith("allreduce")

    def __str__(self) -> str:
        """As a key of a table: equal for axes that differ in their names alone."""
        among = f"{self.axis.size} ranks by {self.axis.stride}"
        return f"{self.name} {self.nbytes} bytes, {among}, alone and beside products"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The data that one rank sends in a ring collective.

    Attributes:
        link: by which link its slowest neighbour is reached.
        nbytes: how much.
        messages: in how many steps.
    """

    link: str
    nbytes: float
    messages: int


def traffic_of(moved: Collective, device: Device) -> Traffic:
    """Return the data that one rank sends in a collective between such devices."""
    axis = moved.axis
    steps = (2 if moved.reduces_all else 1) * (axis.size - 1)
    link = device.inside if axis.hosts(device) == 1 else device.between
    return Traffic(link.name, steps * moved.nbytes / axis.size, steps)


def collective_seconds(moved: Collective, device: Device) -> float:
    """How long a collective takes, from its start on all ranks at once.

    The quickest of short and large messages and, of an all-reduce, of ring and tree.
    """
    axis, inside, between = moved.axis, device.inside, device.between
    if axis.size == 1 or moved.name == "barrier":
        return device.start
    large, short = (inside.latency, between.latency), (inside.short_latency, between.short_latency)
    # of the bandwidth: NCCL's LL
    part = 1 / 4 if moved.reduces_all or axis.hosts(device) > 1 else 1 / 3
    ways = [_ring(moved, device, large, 1.0), _ring(moved, device, short, part)]
    if moved.reduces_all:
        large = inside.tree_latency, between.tree_latency
        short = inside.short_tree_latency, between.short_tree_latency
        ways += [_tree(moved, device, large, 1.0), _tree(moved, device, short, 1 / 3.8)]
    return device.start + min(ways)


def _bandwidth(axis: Axis, device: Device) -> float:
    """Bytes per second through the narrowest place of rings, one for each device of a host."""
    inside = device.inside.bandwidth
    if axis.hosts(device) == 1:
        narrowest = inside
    else:
        between = axis.per_host(device) * device.between.bandwidth
        narrowest = between if axis.per_host(device) == 1 else min(inside, between)
    return narrowest * device.efficiency.link


def _ring(moved: Collective, device: Device, latencies: tuple[float, float], part: float) -> float:
    axis = moved.axis
    steps, crossings = axis.size - 1, axis.hosts(device) - 1
    waits = (steps - crossings) * latencies[0] + crossings * latencies[1]
    moves = steps / axis.size * moved.nbytes / (_bandwidth(axis, device) * part)
    return (2 if moved.reduces_all else 1) * (waits + moves)


def _tree(moved: Collective, device: Device, latencies: tuple[float, float], part: float) -> float:
    axis = moved.axis
    steps = (axis.per_host(device) - 1) * latencies[0]
    steps += math.ceil(math.log2(axis.hosts(device))) * latencies[1]
    return 2 * (steps + moved.nbytes / (_bandwidth(axis, device) * part))
