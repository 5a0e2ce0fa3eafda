"""Finds the parameters that a ``fully_shard`` call manages, and every module that holds each.

Owns the walk over the modules: what is already sharded below is left out, a parameter tied to one
of those is found again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from fullshard.sharding.groups.param_group import FSDPParamGroup, group_of
from fullshard.sharding.hooks.lookup import state_of
from fullshard.sharding.params.owner import owner_of
from fullshard.sharding.params.param import FSDPParam, Place

__all__ = ["Managed", "Tied", "find_managed"]


@dataclass(frozen=True)
class Tied:
    """One more place of a parameter that another call sharded.

    Attributes:
        param: the parameter.
        group: its group.
        place: where it is held, too.
    """

    param: FSDPParam
    group: FSDPParamGroup
    place: Place


@dataclass
class Managed:
    """What one ``fully_shard`` call finds.

    Attributes:
        places: each parameter to shard and where it is held, in order of first sight.
        names: each parameter's name from the first module that holds it.
        tied: places of parameters that another group shards already.
    """

    places: dict[nn.Parameter, list[Place]] = field(default_factory=dict)
    names: dict[nn.Parameter, str] = field(default_factory=dict)
    tied: list[Tied] = field(default_factory=list)


def find_managed(modules: Sequence[nn.Module], ignored: Iterable[nn.Parameter]) -> Managed:
    """Returns the parameters that a call on ``modules`` manages."""
    skipped = {id(param) for param in ignored}
    managed = Managed()
    for name, module in _walk(modules):
        for key, param in module._parameters.items():
            if param is None or id(param) in skipped:
                continue
            place = Place(module, key)
            owner, group = owner_of(param), group_of(param)
            if owner is not None and group is not None:
                managed.tied.append(Tied(owner.param, group, place))
            else:
                managed.places.setdefault(param, []).append(place)
                managed.names.setdefault(param, f"{name}.{key}" if name else key)
    return managed


def _walk(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields each module under ``modules`` once, but none that is sharded or under one that is."""
    seen: set[nn.Module] = set()

    def descend(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or state_of(module) is not None:
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from descend(f"{name}.{child_name}" if name else child_name, child)

    for module in modules:
        yield from descend("", module)
