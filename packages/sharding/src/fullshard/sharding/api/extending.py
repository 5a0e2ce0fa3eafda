"""Adds extensions to the groups of sharded modules."""

from __future__ import annotations

from torch import nn

from fullshard.sharding.base.checks import require_bool
from fullshard.sharding.extension import GroupExtension, MakeExtension
from fullshard.sharding.hooks.lookup import groups_of

__all__ = ["extend_groups"]


def extend_groups(
    module: nn.Module, make: MakeExtension, *, recurse: bool = True
) -> list[GroupExtension]:
    """Make an extension for each group of ``module``, and call it from now on.

    Call it on every rank. The extensions of a group are called in the order of the calls.

    Args:
        module: a sharded module.
        make: makes the extension of a group: a subclass of ``GroupExtension``, most often.
        recurse: also for the groups of all sharded modules below.

    Returns:
        The extensions, in an order of groups that is equal on all ranks.

    Raises:
        TypeError: if ``make`` returns anything but a ``GroupExtension``, or ``recurse`` is not a
            bool. No group has a new extension then.
        ValueError: if ``module`` is not sharded.
    """
    require_bool("recurse", recurse)
    groups = groups_of(module, recurse)
    made = [make(group) for group in groups]
    for each in made:
        if not isinstance(each, GroupExtension):
            raise TypeError(
                f"{make!r} returned a {type(each).__name__}; return a "
                "fullshard.sharding.GroupExtension, or pass a subclass of it"
            )
    for group, each in zip(groups, made, strict=True):
        group.extend(each)
    return made
