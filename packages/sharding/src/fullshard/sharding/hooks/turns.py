"""Whose turn it is to communicate: that of whoever comes, or one order that all ranks follow.

Owns the question and its default answer, ``FreeTurns``: a group communicates when its module runs,
or with its bucket, which is right as long as every rank runs every group. The other answer is
``CanonicalTurns``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fullshard.sharding.groups.param_group import FSDPParamGroup

__all__ = ["FreeTurns", "Turns"]


class Turns(Protocol):
    """When does a group communicate?"""

    @property
    def free(self) -> bool:
        """Whether a group gathers, stays unsharded and reduces as its own module runs."""
        ...

    def holds(self, group: FSDPParamGroup) -> bool:
        """Tells whether ``group`` must stay unsharded to the end of the root's forward."""
        ...

    def begin_forward(self) -> None:
        """Begins a root forward."""
        ...

    def begin_backward(self) -> None:
        """Begins a backward."""
        ...

    def end(self) -> None:
        """Ends the forward or backward; not called for one that raised."""
        ...

    def gather(self, group: FSDPParamGroup) -> None:
        """Makes it the turn of ``group`` to be gathered, which the caller does next."""
        ...

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Gathers ``group`` ahead, if that may be done now."""
        ...

    def reduce(self, group: FSDPParamGroup) -> None:
        """Takes notice that the backward of ``group`` ended."""
        ...


class FreeTurns:
    """It is the turn of whoever comes."""

    @property
    def free(self) -> bool:
        """True."""
        return True

    def holds(self, group: FSDPParamGroup) -> bool:
        """False."""
        return False

    def begin_forward(self) -> None:
        """Nothing to do."""

    def begin_backward(self) -> None:
        """Nothing to do."""

    def end(self) -> None:
        """Nothing to do."""

    def gather(self, group: FSDPParamGroup) -> None:
        """Gathers it with those of its bucket, if it has one."""
        if group.bucket is not None:
            group.bucket.gather(group, ahead=False)

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Gathers it, with those of its bucket if it has one."""
        if group.bucket is not None:
            group.bucket.gather(group, ahead=True)
        group.prefetch()

    def reduce(self, group: FSDPParamGroup) -> None:
        """Nothing to do: it was reduced."""
