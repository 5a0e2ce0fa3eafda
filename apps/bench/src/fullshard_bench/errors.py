"""The one error that a user of the benchmark can meet and put right.

Everything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

__all__ = ["BenchError"]


class BenchError(Exception):
    """Something the user can put right; shown as one line, without a traceback.

    The message says what came, what is allowed and what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
