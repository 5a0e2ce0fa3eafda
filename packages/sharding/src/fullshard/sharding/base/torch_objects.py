"""Objects of ``torch.distributed.fsdp``, read by their fields: what they mean here.

Libraries pass torch's own policies, mesh dims and placements, which callers cannot replace by ours.
Owns how such an object is known, by the name and module of its class, as no package imports
``torch.distributed.fsdp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar, cast

__all__ = ["converted", "torchs_class"]

_T = TypeVar("_T")


def torchs_class(value: object) -> str | None:
    """Return the name of the class of ``torch.distributed.fsdp`` that ``value`` is of, or None.

    A user's subclass counts as the class of torch that it extends.
    """
    for each in type(value).__mro__:
        if f"{each.__module__}.".startswith("torch.distributed.fsdp."):
            return each.__name__
    return None


def converted(value: _T, kinds: Mapping[str, Any]) -> _T:
    """Return ours with the fields of ``value``, if it is torch's; else ``value`` itself.

    Args:
        value: what came: an instance of a dataclass, or a member of an enum.
        kinds: our classes by the names of torch's.
    """
    own = kinds.get(torchs_class(value) or "")
    if own is None:
        return value
    if issubclass(own, Enum):
        member: _T = own[cast(Enum, value).name]
        return member
    names = [each.name for each in fields(own) if each.init and hasattr(value, each.name)]
    ours: _T = own(**{name: getattr(value, name) for name in names})
    return ours
