"""The memory of real ranks, counted where it is allocated: by the C library, not by tensors.

``counted`` trains each of ``KINDS`` on two ranks over gloo, in processes whose ``malloc`` counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

_SOURCE = Path(__file__).with_name("count.c")
_RANKS = 2


def counted(folder: Path, names: list[str]) -> dict[str, list[int]] | None:
    """Return the peak bytes of each step on rank 0, by the name of the kind.

    Args:
        folder: for the library, the store and the result.
        names: of the kinds.

    Returns:
        None without a C compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "count.so"
    words = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
    subprocess.run(words, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "support.counted.rank", str(rank), str(_RANKS), folder, *names],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(_RANKS)
    ]  # fmt: skip
    for rank in ranks:
        _, said = rank.communicate(timeout=300)
        assert rank.returncode == 0, said
    found: dict[str, list[int]] = json.loads((folder / "peaks.json").read_text())
    return found
