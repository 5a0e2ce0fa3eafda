"""The groups of this process, and snapshots that show whether a group changed.

The main class is ``Snapshot``. Holds no group alive. The hooks of optimizers and the norm of
gradients ask it before they reuse what they found out about parameters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.groups.param_group import FSDPParamGroup

__all__ = ["Snapshot", "add_groups", "all_groups", "are_same", "params_in"]

_replacements = attrgetter("replacements")
_params = itemgetter("params")


def params_in(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters in the groups of an optimizer, in order."""
    return list(chain.from_iterable(map(_params, groups)))


def are_same(found: Collection[Any], known: Collection[Any]) -> bool:
    """Return whether both hold identical objects: ``==`` of tensors is another question."""
    return len(found) == len(known) and all(map(is_, found, known))


class _Groups:
    """The groups that are alive.

    Attributes:
        added: how often groups were added.
    """

    def __init__(self) -> None:
        """Start without groups."""
        self.added = 0
        self._alive: weakref.WeakSet[FSDPParamGroup] = weakref.WeakSet()
        self._lock = threading.Lock()  # ranks may be threads of one process, each with its models

    def add(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Add ``groups``."""
        with self._lock:
            self._alive.update(groups)
            self.added += 1

    def all(self) -> tuple[FSDPParamGroup, ...]:
        """Return the groups."""
        with self._lock:
            return tuple(self._alive)


_groups = _Groups()

add_groups = _groups.add
"""Add groups that ``fully_shard`` made."""

all_groups = _groups.all
"""Return the groups of all models of this process that are alive."""


class Snapshot:
    """The versions of some groups at one time, and which groups there were."""

    def __init__(self, generations: Iterable[ParameterGeneration]) -> None:
        """Note the versions of the groups that ``generations`` belong to."""
        self._added = _groups.added
        self._generations = list(dict.fromkeys(generations))
        self._versions = list(map(_replacements, self._generations))

    @property
    def is_current(self) -> bool:
        """Whether no tensor of these groups was replaced since, and no group was added."""
        return (
            self._added == _groups.added
            and list(map(_replacements, self._generations)) == self._versions
        )
