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

__all__ = ["Axis", "Traffic", "collective_seconds", "traffic_of"]


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


def traffic_of(name: str, nbytes: int, axis: Axis, device: Device) -> Traffic:
    """Return the data that one rank sends to gather or reduce ``nbytes`` over all ranks.

    Args:
        name: of the operator, without its namespace.
        nbytes: of an all-gather's output, a reduce-scatter's input, an all-reduce's tensor.
        axis: the ranks.
        device: what they compute on.
    """
    rounds = 2 if name.startswith("allreduce") else 1
    steps = rounds * (axis.size - 1)
    link = device.inside if axis.hosts(device) == 1 else device.between
    return Traffic(link.name, steps * nbytes / axis.size, steps)


def collective_seconds(name: str, nbytes: int, axis: Axis, device: Device) -> float:
    """How long a collective takes, from its start on all ranks at once.

    The quickest of short and large messages and, of an all-reduce, of ring and tree.

    Args:
        name: of the operator, without its namespace.
        nbytes: as for ``traffic_of``.
        axis: the ranks.
        device: what they compute on.
    """
    if axis.size == 1 or name == "barrier":
        return device.start
    inside, between = device.inside, device.between
    large, short = (inside.latency, between.latency), (inside.short_latency, between.short_latency)
    reduces_all = name.startswith("allreduce")
    part = 1 / 4 if reduces_all or axis.hosts(device) > 1 else 1 / 3  # of the bandwidth: NCCL's LL
    ways = [_ring(name, nbytes, axis, device, large, 1.0)]
    ways.append(_ring(name, nbytes, axis, device, short, part))
    if reduces_all:
        large = inside.tree_latency, between.tree_latency
        short = inside.short_tree_latency, between.short_tree_latency
        ways += [
            _tree(nbytes, axis, device, large, 1.0),
            _tree(nbytes, axis, device, short, 1 / 3.8),
        ]
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


def _ring(
    name: str,
    nbytes: int,
    axis: Axis,
    device: Device,
    latencies: tuple[float, float],
    part: float,
) -> float:
    rounds = 2 if name.startswith("allreduce") else 1
    steps, crossings = axis.size - 1, axis.hosts(device) - 1
    waits = (steps - crossings) * latencies[0] + crossings * latencies[1]
    moved = steps / axis.size * nbytes / (_bandwidth(axis, device) * part)
    return rounds * (waits + moved)


def _tree(
    nbytes: int, axis: Axis, device: Device, latencies: tuple[float, float], part: float
) -> float:
    steps = (axis.per_host(device) - 1) * latencies[0]
    steps += math.ceil(math.log2(axis.hosts(device))) * latencies[1]
    return 2 * (steps + nbytes / (_bandwidth(axis, device) * part))
