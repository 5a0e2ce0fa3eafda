"""Checks a policy once, where it is handed in: that it answers every question of its protocol.

torch's own policy objects are answered for by their fields.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

from fullshard.sharding.base.torch_objects import FieldPrecision, OffloadToCPU, converted
from fullshard.sharding.protocols import NoOffload

__all__ = ["require"]

_P = TypeVar("_P")


def require(protocol: type[_P], value: object, argument: str) -> _P:
    """Returns ``value``, which has every member that ``protocol`` asks for.

    For torch's own policy object it returns what answers by its fields.

    Args:
        protocol: one of those of ``protocols``, or another.
        value: the policy that came.
        argument: the name of the argument it came as, for the message.

    Raises:
        TypeError: naming what is missing.
    """
    if isinstance(value, type):
        raise TypeError(
            f"{argument} is the class {value.__name__}; pass an instance: {value.__name__}()"
        )
    policy = converted(value, _TORCHS)
    missing = [name for name in _members(protocol) if not callable(getattr(policy, name, None))]
    if not missing:
        return cast(_P, policy)
    raise TypeError(
        f"{argument} is a {type(value).__name__}, which lacks {', '.join(missing)}; pass an "
        f"instance of a policy of fullshard.policies, or any object with the methods of "
        f"{protocol.__name__}"
    )


_TORCHS = {
    "MixedPrecisionPolicy": FieldPrecision,
    "CPUOffloadPolicy": OffloadToCPU,
    "OffloadPolicy": NoOffload,
}


def _members(protocol: type) -> list[str]:
    names: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        if base in (object, Protocol) or base.__name__ == "Generic":
            continue
        names.update({name: None for name in vars(base) if not name.startswith("_")})
    return list(names)
