"""Latency and bandwidth between each pair of ranks, measured in rounds without conflicts.

``measure_pairs`` is called by all ranks together. The rounds
follow the circle method for tournaments: no rank talks with two ranks at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.preflight.verification.agree import everyones

__all__ = ["Pair", "measure_pairs", "pairs_by_round"]

_PINGS = 15
_SMALL, _LARGE = 8, 4 << 20  # bytes
_BULKS = 3


@dataclass(frozen=True)
class Pair:
    """The speed between two ranks.

    Attributes:
        ranks: the two ranks, ascending.
        latency: seconds for a small message, half of a round trip.
        bandwidth: bytes per second of a large message.
    """

    ranks: tuple[int, int]
    latency: float
    bandwidth: float


def pairs_by_round(ranks: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which each pair of ``ranks`` occurs once."""
    circle: list[int | None] = [*ranks, *([None] if len(ranks) % 2 else [])]
    rounds = []
    for _ in range(max(len(circle) - 1, 0)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def measure_pairs(ranks: Sequence[int], device: torch.device) -> list[Pair]:
    """Measure all pairs of ``ranks``; every rank of the process group calls it.

    Args:
        ranks: the ranks to measure.
        device: where tensors of messages are.

    Returns:
        The pairs, the same on every rank.
    """
    mine: list[Pair] = []
    rank = dist.get_rank()
    for pairs in pairs_by_round(ranks):
        dist.barrier()
        for pair in pairs:
            if rank in pair:
                latency, bandwidth = _measured(pair, rank, device)
                if rank == pair[0]:
                    mine.append(Pair(pair, latency, bandwidth))
    links = [link for links in everyones(mine) for link in links]
    return sorted(links, key=lambda link: link.ranks)


def _measured(pair: tuple[int, int], rank: int, device: torch.device) -> tuple[float, float]:
    other = pair[1] if rank == pair[0] else pair[0]
    times = {}
    for nbytes, count in ((_SMALL, _PINGS), (_LARGE, _BULKS)):
        message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        found = []
        for number in range(count + 1):
            start = time.perf_counter()
            if rank == pair[0]:
                dist.send(message, other)
                dist.recv(message, other)
            else:
                dist.recv(message, other)
                dist.send(message, other)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            if number:  # the first opens the connection
                found.append(time.perf_counter() - start)
        times[nbytes] = statistics.median(found) / 2
    return times[_SMALL], _LARGE / times[_LARGE]
