"""Process groups that the ranks of a larger one make without the others.

Owns the agreement that torch asks for and does not check: torch names such a group after a number
of groups that each rank counts, so ranks with different numbers wait for each other forever.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fullshard.sharding.base.comparison import Comparison
from fullshard.sharding.mesh.compat import count_of_process_groups

__all__ = ["known_subgroup", "made_once", "new_subgroup"]

_T = TypeVar("_T")

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakValueDictionary[Hashable, Any]]
_made = weakref.WeakKeyDictionary()

_COUNT = Comparison(
    what="the making of a process group",
    error="",
    mismatch="ranks count different numbers of process groups, and torch would name the new one "
    "differently on each: ",
    advice="Make process groups (dist.new_group, DeviceMesh) on all ranks alike",
)


def made_once(process_group: dist.ProcessGroup, key: Hashable, make: Callable[[], _T]) -> _T:
    """Return what was made for ``key`` of a process group, while anybody holds it; else make it.

    torch holds process groups until they are destroyed.
    """
    made = _made.setdefault(process_group, weakref.WeakValueDictionary())
    found: _T | None = made.get(key)
    if found is None:
        made[key] = found = make()
    return found


def known_subgroup(ranks: frozenset[int], backend: str | None = None) -> dist.ProcessGroup:
    """Return a process group of ``ranks``, this one among them; made once, without any other.

    Args:
        ranks: global ranks; these ranks must make the first call at the same place.
        backend: None: that of the default process group.
    """
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    make = partial(dist.new_group, sorted(ranks), backend=backend, use_local_synchronization=True)
    made: dist.ProcessGroup = made_once(world, (ranks, backend), make)
    return made


def new_subgroup(
    ranks: Sequence[int], among: dist.ProcessGroup, device: torch.device
) -> dist.ProcessGroup:
    """Return a process group of ``ranks``; a collective over ``among``, which holds them.

    Args:
        ranks: global ranks, this one's among them.
        among: a process group all of whose ranks make such a group now.
        device: what its backend moves.

    Raises:
        RuntimeError: on all ranks of ``among``, if they count different numbers of process groups.
    """
    count = count_of_process_groups()
    differs = _COUNT.verdict([(str(count), f"{count} process groups")], "", among, device)
    if differs:
        raise RuntimeError(differs)
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is one of them"
    return made
