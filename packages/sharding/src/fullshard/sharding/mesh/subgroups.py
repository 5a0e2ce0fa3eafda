"""Process groups that the ranks of a larger one make without the others.

Owns the agreement that torch asks for and does not check: it names such a group after how many
groups a rank is in, so ranks that are in more or in fewer wait for each other for ever.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm import ProcessGroupTransport, SelfTransport, Transport
from fullshard.comm.runtime.host_reads import host_values
from fullshard.sharding.base.compat import count_of_process_groups

__all__ = ["known_subgroup", "new_subgroup"]

_known: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[frozenset[int], str | None], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


def known_subgroup(ranks: frozenset[int], backend: str | None = None) -> dist.ProcessGroup:
    """Returns a process group of ``ranks``, this one among them; made once, without any other.

    Args:
        ranks: global ranks; all of them call it for the first time at the same place.
        backend: None: that of the default process group.
    """
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    known = _known.setdefault(world, {})
    if (ranks, backend) not in known:
        known[ranks, backend] = dist.new_group(
            sorted(ranks), backend=backend, use_local_synchronization=True
        )
    return known[ranks, backend]


def new_subgroup(
    ranks: Sequence[int], among: dist.ProcessGroup, device: torch.device
) -> dist.ProcessGroup:
    """Returns a process group of ``ranks``; a collective over ``among``, which holds them.

    Args:
        ranks: global ranks, this one's among them.
        among: a process group all of whose ranks make such a group now.
        device: what its backend moves.

    Raises:
        RuntimeError: on all ranks of ``among``, if they are in different numbers of process groups.
    """
    counts = torch.zeros(among.size(), dtype=torch.int64, device=device)
    count = count_of_process_groups()
    mine = torch.full((1,), count, dtype=torch.int64, device=device)
    transport: Transport = SelfTransport() if among.size() == 1 else ProcessGroupTransport()
    transport.all_gather(counts, mine, among, False)
    told = host_values(counts, [count] * among.size())
    found = dict(zip(dist.get_process_group_ranks(among), told, strict=True))
    if len(set(found.values())) > 1:
        said = ", ".join(f"rank {rank} in {each}" for rank, each in found.items())
        raise RuntimeError(
            f"ranks {list(ranks)} cannot make a process group of their own, as they are in "
            f"different numbers of process groups ({said}) and torch would name it differently on "
            "each; make process groups (dist.new_group, DeviceMesh) on all ranks alike"
        )
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is one of them"
    return made
