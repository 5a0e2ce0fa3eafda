"""Checks of all ranks together: equal versions, right collectives, speeds of links and machines.

``diagnose`` is the main function. Every rank calls it and gets the same findings.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.comm import TensorSpec, all_gather_tensors, reduce_scatter_tensors
from fullshard.comm.spi import carrier_of
from fullshard.preflight.doctor.findings import Diagnosis, Finding, Level, fail, fine, warn
from fullshard.preflight.doctor.here import Facts, check_disk, check_here, facts_here
from fullshard.preflight.doctor.pairs import Pair, measure_pairs
from fullshard.preflight.machine import usable_device
from fullshard.preflight.verification.agree import everyones

__all__ = ["diagnose"]

_SLOW = 0.5  # of the median: a link or a machine below it is named
_LATE = 3.0  # times the usual latency
_SHORT = 1e-4  # seconds: shorter latencies are not compared
_CLOCKS = 1.0  # seconds between clocks
_MOST_RANKS = 64  # pairs of more ranks take too long, so one rank of each host stands for it
_ODD = 257  # elements: no number of ranks divides it


def diagnose(folder: Path | None = None) -> Diagnosis:
    """Check this machine and, in a process group, the connections of all ranks.

    Takes about ten seconds on ranks of one host. Without a process group only this process is
    checked.

    Args:
        folder: a folder whose disk is measured; None: no disk.

    Returns:
        The findings, the same on every rank.
    """
    facts = facts_here()
    mine = [*check_here(facts), *([] if folder is None else [check_disk(folder)])]
    if not dist.is_initialized():
        return Diagnosis(mine)
    everyone = everyones((facts, mine))
    all_facts = [each for each, _ in everyone]
    device = _device()
    return Diagnosis(
        [
            *_merged([found for _, found in everyone]),
            *_compare_versions(all_facts),
            *_compare_machines(all_facts),
            _compare_clocks(),
            *_check_collectives(device),
            *_check_speeds(all_facts),
            *_check_links(all_facts, device),
        ]
    )


def _device() -> torch.device:
    """Return the device on which the ranks' messages are."""
    world = dist.group.WORLD
    assert world is not None, "there is a process group"
    return carrier_of(world, usable_device())


def _said_of(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _merged(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of single ranks: a subject that all found right once, by rank 0."""
    subjects: dict[str, dict[Finding, list[int]]] = {}
    for rank, findings in enumerate(by_rank):
        for each in findings:
            subjects.setdefault(each.subject, {}).setdefault(each, []).append(rank)
    merged = []
    for found in subjects.values():
        if all(each.level is Level.OK for each in found):
            merged.append(next(iter(found)))
            continue
        for each, ranks in found.items():
            if len(ranks) == len(by_rank):
                merged.append(each)
            elif each.level is not Level.OK:
                text = f"{_said_of(ranks)}: {each.text}"
                merged.append(Finding(each.level, each.subject, text, each.advice, tuple(ranks)))
    return merged


def _compare_versions(facts: Sequence[Facts]) -> list[Finding]:
    """Return the ranks whose versions differ from those of most ranks."""
    names = dict.fromkeys(name for each in facts for name in each.versions)
    found = []
    for name in names:
        versions = [each.versions.get(name, "none") for each in facts]
        usual, _ = Counter(versions).most_common(1)[0]
        other = [rank for rank, version in enumerate(versions) if version != usual]
        if other:
            told = ", ".join(f"rank {rank} ({facts[rank].host}) {versions[rank]}" for rank in other)
            found.append(
                fail(
                    f"versions of {name}",
                    f"{told}; the other ranks have {usual}",
                    "install the same version on every host",
                    other,
                )
            )
    return found or [fine("versions of all ranks", "equal")]


def _compare_machines(facts: Sequence[Facts]) -> list[Finding]:
    hosts: dict[str, list[int]] = {}
    for rank, each in enumerate(facts):
        hosts.setdefault(each.host, []).append(rank)
    sizes = sorted({len(ranks) for ranks in hosts.values()})
    text = f"{len(facts)} ranks on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    found = [fine("ranks", text)]
    if len(sizes) > 1:
        told = ", ".join(f"{host} has {len(ranks)}" for host, ranks in hosts.items())
        found = [warn("ranks", told, "start the same number of ranks on each host")]
    for host, ranks in hosts.items():
        cores, threads = facts[ranks[0]].cores, sum(facts[rank].threads for rank in ranks)
        most = max(facts[rank].threads for rank in ranks)
        if most > 1 and threads > cores and all(facts[rank].device == "cpu" for rank in ranks):
            text = f"{host}: {len(ranks)} ranks have {threads} threads on {cores} cores"
            found.append(
                warn("threads", text, f"set OMP_NUM_THREADS={max(cores // len(ranks), 1)}", ranks)
            )
    lost = [rank for rank, each in enumerate(facts) if each.loopback]
    if len(hosts) > 1 and lost:
        text = f"the host name of {_said_of(lost)} is a loopback address"
        advice = "set GLOO_SOCKET_IFNAME to the network interface, or correct /etc/hosts"
        found.append(fail("host names", text, advice, lost))
    return found


def _compare_clocks() -> Finding:
    """Compare clocks with rank 0's; a barrier before it makes all ranks look at one moment."""
    dist.barrier()
    times = everyones(time.time())
    offsets = [each - times[0] for each in times]
    late = [rank for rank, offset in enumerate(offsets) if abs(offset) > _CLOCKS]
    if late:
        told = ", ".join(f"rank {rank} {offsets[rank]:+.1f} s" for rank in late)
        advice = "synchronise the clocks (chrony, ntpd): logs cannot be put in order"
        return warn("clocks", f"beside rank 0: {told}", advice, late)
    return fine("clocks", f"within {_CLOCKS:.0f} s of rank 0's")


# -- collectives ----------------------------------------------------------------------------------


def _check_collectives(device: torch.device) -> list[Finding]:
    """Run each collective with whole numbers, whose sums are exact, and compare every bit."""
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    assert group is not None, "there is a process group"
    full = torch.arange(_ODD * world, dtype=torch.float32, device=device)
    spec = TensorSpec(shape=(_ODD * world,), dtype=torch.float32)

    def gather() -> bool:
        shard = full[_ODD * rank : _ODD * (rank + 1)].clone()
        return torch.equal(all_gather_tensors([shard], [spec], group)[0], full)

    def reduce_scatter() -> bool:
        shards = reduce_scatter_tensors([full * (rank + 1)], [spec], group, divide_factor=1.0)
        total = full * (world * (world + 1) // 2)
        return torch.equal(shards[0], total[_ODD * rank : _ODD * (rank + 1)])

    def all_reduce() -> bool:
        number = torch.full((_ODD,), float(rank), device=device)
        dist.all_reduce(number)
        return torch.equal(number, torch.full_like(number, world * (world - 1) / 2))

    checks: Mapping[str, Callable[[], bool]] = {
        "all-gather": gather,
        "reduce-scatter": reduce_scatter,
        "all-reduce": all_reduce,
    }
    found = []
    for name, check in checks.items():
        right = everyones(check())
        wrong = [each for each, is_right in enumerate(right) if not is_right]
        if wrong:
            text = f"{_said_of(wrong)} got wrong numbers"
            advice = "do not train: replace the memory, device or network of these ranks"
            found.append(fail(name, text, advice, wrong))
        else:
            found.append(fine(name, "right to the bit on every rank"))
    return found


# -- speeds ---------------------------------------------------------------------------------------


def _check_speeds(facts: Sequence[Facts]) -> list[Finding]:
    """Time the same products on every rank."""
    one = torch.ones(256, 256)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(4):
            one = (one @ one).clamp_(-1, 1)
        times.append(time.perf_counter() - start)
    speeds = [1 / seconds for seconds in everyones(min(times))]
    usual = statistics.median(speeds)
    slow = [rank for rank, speed in enumerate(speeds) if speed < _SLOW * usual]
    if not slow:
        return [fine("speed of hosts", "alike")]
    told = ", ".join(f"rank {r} ({facts[r].host}) {speeds[r] / usual:.2f}" for r in slow)
    advice = "look for other programs, throttling or too many threads on these hosts"
    return [warn("speed of hosts", f"of the median: {told}", advice, slow)]


def _check_links(facts: Sequence[Facts], device: torch.device) -> list[Finding]:
    hosts = [each.host for each in facts]
    ranks = list(range(len(hosts)))
    if len(ranks) > _MOST_RANKS:
        ranks = list({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
        ranks = sorted(ranks)[:_MOST_RANKS]
    links = measure_pairs(ranks, device)
    found = []
    inside = [link for link in links if hosts[link.ranks[0]] == hosts[link.ranks[1]]]
    across = [link for link in links if link not in inside]
    for subject, kind in (("links inside hosts", inside), ("links between hosts", across)):
        if kind:
            found.extend(_judged(subject, kind, hosts))
    return found


def _judged(subject: str, links: Sequence[Pair], hosts: Sequence[str]) -> list[Finding]:
    """Compare links of one kind, and name slow ranks and slow pairs of other ranks.

    A slow rank has only slow links. The best link of each rank is compared with the median of all
    best links: with three ranks, one slow rank makes most links slow.
    """
    ranks = sorted({rank for link in links for rank in link.ranks})
    of = {rank: [link for link in links if rank in link.ranks] for rank in ranks}
    best = {rank: max(link.bandwidth for link in of[rank]) for rank in ranks}
    quickest = {rank: min(link.latency for link in of[rank]) for rank in ranks}
    bandwidth = statistics.median(best.values())
    latency = max(statistics.median(quickest.values()), _SHORT)
    slow = [r for r in ranks if best[r] < _SLOW * bandwidth or quickest[r] > _LATE * latency]
    pairs = [
        link.ranks
        for link in links
        if (link.bandwidth < _SLOW * bandwidth or link.latency > _LATE * latency)
        and not set(link.ranks) & set(slow)
    ]
    text = f"{bandwidth / 1e6:.0f} MB/s, {latency * 1e6:.0f} us"
    found = [fine(subject, f"{text} at best, the median of {len(ranks)} ranks")]
    if slow:
        told = ", ".join(
            f"rank {r} ({hosts[r]}) {best[r] / 1e6:.0f} MB/s, {quickest[r] * 1e6:.0f} us"
            for r in slow
        )
        advice = "check cable, port and other traffic of these hosts"
        found.append(warn(subject, f"slow at best: {told}", advice, slow))
    if pairs:
        told = ", ".join(f"{a} and {b}" for a, b in pairs[:8])
        advice = "check what only these pairs share, such as a switch"
        both = sorted({rank for pair in pairs for rank in pair})
        found.append(warn(subject, f"slow between ranks {told}", advice, both))
    return found
