"""The one error that a user of the trainer can meet and put right.

Everything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["TrainError", "did_you_mean", "no_such"]


class TrainError(Exception):
    """Something the user can put right; shown as one line, without a traceback.

    Every rank raises it, or none does: all ranks compute it alike, or
    `fullshard_train.ranks.distributed.on_main` and `raise_together` carry one rank's error to all
    of them. The message contains the value, the allowed values and the cure.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return "did you mean steps?" if a name is close to an allowed one, or "" if none is."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else ""


def no_such(kind: str, name: str, allowed: Iterable[str]) -> str:
    """The end of an error about an unknown name: the likely one, and all that are allowed."""
    names = list(allowed)
    likely = did_you_mean(name, names)
    return f"no such {kind}; {likely}{' ' if likely else ''}allowed: {', '.join(names)}"
