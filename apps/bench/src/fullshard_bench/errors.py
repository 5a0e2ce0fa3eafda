"""The error for mistakes that a user can correct, and its way from a rank to the user.

Everything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import fullshard

__all__ = ["BenchError", "exit_code", "told_of"]


class BenchError(Exception):
    """Something the user can put right; shown as one line, without a traceback.

    The message contains the value, the allowed values and the cure.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def exit_code(work: Callable[[], None], folder: Path, rank: int) -> int:
    """Exit codes of a rank.

    Returns:
        0; 2 after an error that the user can correct, written to `error-<rank>.txt` of the folder;
        1 after any other, with its traceback.
    """
    try:
        work()
    except BenchError as error:
        (folder / f"error-{rank}.txt").write_text(str(error), encoding="utf-8")
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def told_of(error: Exception) -> str:
    """An error of a user's own code in one line: what it is, and the innermost line of theirs."""
    others = (str(Path(torch.__file__).parent), str(Path(__file__).parent), *fullshard.__path__)
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if not each.filename.startswith(others)
    ]
    where = f", in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"raised {type(error).__name__}: {error}{where}"
