"""A script as FSDP1's tutorials have it runs unchanged but for the import, with the same losses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from support.members import MEMBERS, ROOT
from support.ranks import run_on_ranks

SCRIPT = ROOT / "tests" / "wrappers" / "scripts" / "fsdp1_tutorial.py"


_ABORTED = "terminate called without an active exception"  # of a rank at its end


def _run_torchs(text: str, folder: Path, ranks: int, *options: str) -> Any:
    """As ``_run``; again where torch's own rank is aborted at its end (PyTorch issue 190489)."""
    try:
        return _run(text, folder, ranks, *options)
    except AssertionError as error:
        if _ABORTED not in str(error):
            raise
    return _run(text, folder, ranks, *options)


def _run(text: str, folder: Path, ranks: int, *options: str) -> Any:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(member.folder / "src") for member in MEMBERS),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch = [*launcher, f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, script.name, *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def _execute(text: str, folder: Path, options: tuple[str, ...]) -> str:
    """Runs on a rank: what the script prints; its process group is the pool's."""
    printed = io.StringIO()
    with (
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        patch.object(sys, "argv", ["script.py", "--folder", str(folder), *options]),
        contextlib.redirect_stdout(printed),
    ):
        exec(compile(text, "script.py", "exec", dont_inherit=True), {"__name__": "__main__"})
    return printed.getvalue()


def _run_on_pool(text: str, folder: Path, ranks: int, *options: str) -> Any:
    folder.mkdir()
    printed = run_on_ranks(_execute, ranks, text, folder, options)[0]
    return json.loads(printed.strip().splitlines()[-1])


_UNDER_TORCHRUN = {"run_theirs": _run_torchs, "run_ours": _run}
_ON_THE_POOL = {"run_theirs": _run_on_pool, "run_ours": _run_on_pool}


@pytest.mark.filterwarnings("ignore")  # torch's own FSDP1 warns that it is deprecated
@pytest.mark.parametrize(
    ("ranks", "options", "how"),
    [
        pytest.param(2, [], _ON_THE_POOL, id="full"),
        pytest.param(2, [], _UNDER_TORCHRUN, id="full-torchrun", marks=pytest.mark.matrix),
        pytest.param(2, ["--bf16"], _UNDER_TORCHRUN, id="bf16", marks=pytest.mark.matrix),
        pytest.param(4, [], _UNDER_TORCHRUN, id="full-4ranks", marks=pytest.mark.matrix),
    ],
)
def test_the_script_gives_the_same_losses_with_its_imports_changed(
    ranks: int, options: list[str], how: dict[str, Callable[..., Any]], tmp_path: Path
) -> None:
    text = SCRIPT.read_text()
    changed = text.replace("torch.distributed.fsdp.wrap", "fullshard.wrappers.wrap")
    changed = changed.replace("torch.distributed.fsdp", "fullshard.wrappers.fsdp1")
    pairs = zip(text.splitlines(), changed.splitlines(), strict=True)
    lines = [one for one, other in pairs if one != other]
    assert len(lines) == 3 and all(line.startswith("from ") for line in lines)
    theirs = how["run_theirs"](text, tmp_path / "torch", ranks, *options)
    ours = how["run_ours"](changed, tmp_path / "ours", ranks, *options)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["accuracy"] == theirs["accuracy"]
    assert ours["checksum"] == pytest.approx(theirs["checksum"], rel=1e-4)
    assert ours["losses"][-1] < ours["losses"][0]
