"""``python -m fullshard.preflight verify``: what it prints, and with which code it ends."""

from __future__ import annotations

import importlib
import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from support.ranks import distributed

COMMAND = importlib.import_module("fullshard.preflight.__main__")

PROGRAM = """
from support.verification.fault import batch, build, loss, shard
from support.verification.faults import FAULTS

def good():
    return {"build_model": build, "shard": shard, "batch": batch, "loss": loss}

def bad():
    return good() | FAULTS[0].program


"""


def _run(folder: Path, *words: str) -> tuple[int, str]:
    (folder / f"program{dist.get_rank()}.py").write_text(PROGRAM)
    sys.path.insert(0, str(folder))
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            function = f"program{dist.get_rank()}:{words[0]}"
            return COMMAND.main(["verify", function, *words[1:]]), printed.getvalue()
    finally:
        sys.path.remove(str(folder))


@distributed(2)
def test_it_prints_on_rank_0_and_ends_with_0_if_equal_and_1_if_not(tmp_path: Path) -> None:
    code, printed = _run(tmp_path, "good", "--steps", "1")
    assert code == 0
    assert printed.startswith("equal over 1 step\n" if dist.get_rank() == 0 else "")
    assert bool(printed) == (dist.get_rank() == 0)
    code, printed = _run(tmp_path, "bad")
    assert code == 1
    assert dist.get_rank() > 0 or "cause: random numbers drawn per rank" in printed


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("program", r"'program' is no module:function"),
        ("no_such_module:function", r"cannot be imported: No module named"),
        ("math:no_such", r"cannot be imported: module 'math' has no attribute"),
    ],
)
def test_a_wrong_function_is_said_in_one_line(word: str, says: str) -> None:
    with pytest.raises(SystemExit, match=says):
        COMMAND.main(["verify", word])
