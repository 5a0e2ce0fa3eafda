"""The one error that a user of the trainer can meet and put right.

Everything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

__all__ = ["TrainError"]


class TrainError(Exception):
    """Something the user can put right; shown as one line, without a traceback.

    Every rank raises it, or none does: all ranks compute it alike, or
    `fullshard_train.ranks.distributed.on_main` and `raise_together` carry one rank's error to all
    of them. The message contains the value, the allowed values and the cure.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
