"""The notebook runs from top to bottom in one process, and prints what it shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from support.members import MEMBERS, ROOT

PATH = ROOT / "examples" / "two_ranks.ipynb"
MARK = "---- a cell ends here ----"


def _cells() -> list[dict[str, Any]]:
    """The cells with code, in order."""
    cells = json.loads(PATH.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed() -> list[str]:
    """What each cell prints when all run in order, in one new process."""
    sources = ["".join(cell["source"]) for cell in _cells()]
    program = f"\nprint({MARK!r})\n".join([*sources, ""])
    folders = os.pathsep.join(str(member.folder / "src") for member in MEMBERS)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split(f"{MARK}\n")[:-1]


@pytest.mark.matrix
def test_each_cell_prints_what_the_notebook_shows_under_it() -> None:
    shown = [
        "".join(line for output in cell["outputs"] for line in output["text"]) for cell in _cells()
    ]
    assert all(shown), "a cell shows nothing"
    assert printed() == shown


def test_the_losses_of_two_ranks_are_those_of_the_plain_model() -> None:
    last = "".join(_cells()[-1]["outputs"][0]["text"])
    pairs = re.findall(r"two ranks ([\d.]+), plain ([\d.]+)", last)
    assert len(pairs) == 4 and all(one == other for one, other in pairs)
