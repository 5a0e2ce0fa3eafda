"""The one error that a user of the trainer can meet and put right.

Everything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

__all__ = ["TrainError"]


class TrainError(Exception):
    """Something the user can put right; shown as one line, without a traceback.

    An error that is raised on every rank or on none: either from what all ranks compute alike, or
        through
    `fullshard_train.ranks.distributed.on_main` and `together`, which carry one rank's error to all
    of them. The message contains the value, the allowed values and the cure.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
