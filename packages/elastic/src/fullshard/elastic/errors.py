"""The errors of this package."""

from __future__ import annotations

__all__ = ["ReplicaGroupError"]


class ReplicaGroupError(RuntimeError):
    """This replica group cannot go on.

    Let the process end: the launcher starts the group again, and it joins the run.
    """
