"""Which ranks of a process group are on one host, and the process groups of the two levels.

Owns the arithmetic, the exchange in which ranks agree, and the process groups: a group with the
ranks of a host, and a group with the ranks that have the same place on each host. Ranks make them
without the others. Refuses: moving bytes (see ``hosts_transport``).
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist

from fullshard.comm.spi import BlockPool, backend_names, is_served, timeout_of
from fullshard.wire.compat import count_of_process_groups
from fullshard.wire.turns import Turns

__all__ = ["Grid", "Hosts", "Level", "Levels", "check_hosts", "given_grid", "grid_of", "levels_of"]

Hosts = int | Literal["names"]
"""How many consecutive ranks each host has, or that they go by the names of their hosts."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranks of a process group, host by host.

    Attributes:
        hosts: how many there are, at least 2; in the order of their first ranks.
        per_host: ranks on each, at least 2.
        order: ranks in the group, those of the first host first; on each as the world counts them.
    """

    hosts: int
    per_host: int
    order: tuple[int, ...]

    def host(self, rank: int) -> int:
        """Return which host a rank is on."""
        return self.order.index(rank) // self.per_host

    def place(self, rank: int) -> int:
        """Return which of its host's ranks it is."""
        return self.order.index(rank) % self.per_host

    def inside(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host."""
        return self.order[host * self.per_host : (host + 1) * self.per_host]

    def between(self, place: int) -> tuple[int, ...]:
        """Return the ranks with this place, one on each host."""
        return self.order[place :: self.per_host]

    @property
    def is_in_order(self) -> bool:
        """Whether the ranks of each host follow one another in the group."""
        return self.order == tuple(range(len(self.order)))


class Level:
    """The process groups for a kind of collective: gathers, or reductions.

    Attributes:
        inside: the ranks of this host.
        between: those of its place, one on each host, in the order of hosts.
        turns: what follows the first phases, in launch order.
    """

    def __init__(self, inside: dist.ProcessGroup, between: dist.ProcessGroup) -> None:
        """Store process groups that have no other users."""
        self.inside = inside
        self.between = between
        self.turns = Turns()
        self._pool = BlockPool()
        self._lock = threading.Lock()  # who waits gives back, and a turn takes

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for so many numbers, ``[numel]``, to be given back."""
        with self._lock:
            nbytes = numel * dtype.itemsize
            block = self._pool.take_block(nbytes, lambda size: _bytes(size, device))
            return block.narrow(0, 0, nbytes).view(dtype)

    def release(self, tensor: torch.Tensor) -> None:
        """Return memory from ``take`` to the pool."""
        with self._lock, torch.inference_mode(False):
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(tensor.untyped_storage())
            self._pool.put_back(whole)


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Levels:
    """The two levels of a process group.

    Attributes:
        grid: its ranks by hosts.
        rank: this one.
        gathers: what gathers move through.
        reductions: what reductions move through; neither waits for the other.
    """

    grid: Grid
    rank: int
    gathers: Level
    reductions: Level


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hosts, Levels | None]] = (
    weakref.WeakKeyDictionary()
)


def check_hosts(hosts: object) -> None:
    """Check an option.

    Raises:
        TypeError: if it is of another type.
        ValueError: if it is no number of ranks and not "names".
    """
    if hosts is None or hosts == "names":
        return
    if not isinstance(hosts, int | str) or isinstance(hosts, bool):
        raise TypeError(
            f"hosts is {hosts!r}, a {type(hosts).__name__}; pass how many ranks each host has, "
            "'names', or None: hosts are not told apart"
        )
    if isinstance(hosts, str) or hosts < 1:
        raise ValueError(
            f"hosts is {hosts!r}; pass how many ranks each host has, such as "
            "int(os.environ['LOCAL_WORLD_SIZE']), 'names', or None: hosts are not told apart"
        )


def grid_of(hosts: Sequence[Hashable], ranks: Sequence[int] = ()) -> Grid | None:
    """Return the ranks of a group by hosts.

    None where a second level gains nothing: on one host, or with one rank on each.

    Args:
        hosts: by rank in the group, where it is.
        ranks: by rank in the group, that in the world; none: the same.

    Raises:
        ValueError: if hosts have different numbers of ranks, or if the order of hosts differs
            between the first and the second places.
    """
    world = ranks or range(len(hosts))
    found: dict[Hashable, list[int]] = {}
    for rank in sorted(range(len(hosts)), key=world.__getitem__):  # as subgroups are ordered
        found.setdefault(hosts[rank], []).append(rank)
    counts = {len(each) for each in found.values()}
    said = ", ".join(f"{host}: {[world[rank] for rank in each]}" for host, each in found.items())
    if len(counts) > 1:
        raise ValueError(
            f"hosts have different numbers of the {len(hosts)} ranks that shard together: {said}; "
            "give each as many, shard inside hosts by a mesh of two dimensions, or leave hosts="
            " away in WirePolicy"
        )
    (count,) = counts
    if len(found) == 1 or count == 1:
        return None
    for places in zip(*found.values(), strict=True):
        if list(places) != sorted(places, key=world.__getitem__):
            raise ValueError(
                f"ranks of the same place on each host do not come in one order of hosts: {said}; "
                "number the ranks of one host after the other, or in turns, or leave hosts= away "
                "in WirePolicy"
            )
    return Grid(len(found), count, tuple(rank for each in found.values() for rank in each))


def given_grid(process_group: dist.ProcessGroup, per_host: int) -> Grid | None:
    """Return the ranks by hosts, each of which has so many consecutive ones of the world's."""
    ranks = dist.get_process_group_ranks(process_group)
    return grid_of([f"host {rank // per_host}" for rank in ranks], ranks)


def levels_of(process_group: dist.ProcessGroup, hosts: Hosts) -> Levels | None:
    """Return the levels of a process group; None where a second one gains nothing.

    The first call is a collective one: ranks compare their settings, and make the process groups of
    each level without other ranks.

    Raises:
        ValueError: on all ranks, if their settings differ, or hosts have different numbers of
            ranks.
        RuntimeError: on all ranks, if they count different numbers of process groups.
    """
    known = _known.setdefault(process_group, {})
    if hosts not in known:
        known[hosts] = _agreed(process_group, hosts)
    return known[hosts]


def _agreed(process_group: dist.ProcessGroup, hosts: Hosts) -> Levels | None:
    if process_group.size() == 1:
        return None
    mine = (hosts, socket.gethostname(), count_of_process_groups())
    found = [mine] * process_group.size()
    dist.all_gather_object(found, mine, group=process_group)
    _compare(ValueError, "WirePolicy(hosts=...)", [told for told, _, _ in found], "the same")
    rank, ranks = process_group.rank(), dist.get_process_group_ranks(process_group)
    if hosts == "names":
        grid = grid_of([name for _, name, _ in found], ranks)
    else:
        grid = given_grid(process_group, hosts)
    if grid is None:
        return None
    what, counts = "how many process groups there are", [count for _, _, count in found]
    _compare(RuntimeError, what, counts, "as many before the first step")
    members = grid.inside(grid.host(rank)), grid.between(grid.place(rank))

    def made() -> Level:
        return Level(*[_subgroup([ranks[each] for each in of], process_group) for of in members])

    gathers = made()
    # Streams keep the order, so a device with streams needs only one pair, like the process group
    # itself.
    return Levels(grid, rank, gathers, made() if is_served(_CPU, process_group) else gathers)


def _compare(error: type[Exception], what: str, found: Sequence[object], advice: str) -> None:
    if len(set(found)) > 1:
        said = ", ".join(f"rank {rank}: {each!r}" for rank, each in enumerate(found))
        raise error(f"ranks disagree on {what}: {said}; give all ranks {advice}")


def _subgroup(ranks: Sequence[int], among: dist.ProcessGroup) -> dist.ProcessGroup:
    gloo = backend_names(among, _CPU) == ("gloo",)
    made = dist.new_group(
        list(ranks),
        backend=dist.get_backend_config(among),
        timeout=timeout_of(among) if gloo else None,
        use_local_synchronization=True,
    )
    return cast("dist.ProcessGroup", made)
