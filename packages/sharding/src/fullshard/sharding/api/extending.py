"""Adds extensions to the groups of sharded modules."""

from __future__ import annotations

from torch import nn

from fullshard.sharding.base.checks import require_bool
from fullshard.sharding.extension import GroupExtension, MakeExtension, made_by
from fullshard.sharding.hooks.lookup import groups_of, the_states

__all__ = ["extend_groups"]


def extend_groups(
    module: nn.Module, make: MakeExtension, *, recurse: bool = True
) -> list[GroupExtension]:
    """Make an extension for each group of ``module``, and call it from now on.

    Call it on every rank. The extensions of a group are called in the order of the calls.

    Args:
        module: a sharded module, or with ``recurse`` one that has such modules below.
        make: makes the extension of a group: a subclass of ``GroupExtension``, most often.
        recurse: also for the groups of all sharded modules below.

    Returns:
        The extensions, in an order of groups that is equal on all ranks.

    Raises:
        TypeError: if ``make`` returns anything but a ``GroupExtension``, or ``recurse`` is not a
            bool. No group has a new extension then.
        ValueError: if no module is sharded.
    """
    require_bool("recurse", recurse)
    if not the_states(module, recurse):
        below = ", and has no sharded module below" if recurse else ""
        raise ValueError(
            f"the {type(module).__name__} is not sharded{below}; call fully_shard first"
        )
    groups = groups_of(module, recurse)
    made = [made_by(make, group) for group in groups]
    for group, each in zip(groups, made, strict=True):
        group.extend(each)
    return made
