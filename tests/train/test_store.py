"""Checkpoint folders: a checkpoint is there as a whole or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fullshard_train
from fullshard_train.checkpoints.store import CheckpointStore, checksum, verify
from fullshard_train.errors import TrainError
from support.trainer.jobs import damage

# Writes a second checkpoint and is killed, as if by the machine, just before a chosen call.
_WRITER = """
import os, signal, sys
from pathlib import Path
from fullshard_train.checkpoints.store import CheckpointStore, checksum

store, name, left = CheckpointStore(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
owner = Path if name in ("rename", "replace") else os
function = getattr(owner, name)

def killing(*arguments, **options):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return function(*arguments, **options)

setattr(owner, name, killing)
folder = store.begin(2)
(folder / "tensors").write_bytes(b"second")
store.commit(2, {"tensors": checksum(folder / "tensors")})
"""


def _write(store: CheckpointStore, step: int, data: bytes) -> Path:
    folder = store.begin(step)
    (folder / "tensors").write_bytes(data)
    return store.commit(step, {"tensors": checksum(folder / "tensors")})


def _kill_writer(root: Path, call: str, before: int) -> int:
    source = str(Path(fullshard_train.__file__).parents[1])
    command = [sys.executable, "-c", _WRITER, str(root), call, str(before)]
    return subprocess.run(command, env={"PYTHONPATH": source}, check=False).returncode


def test_a_committed_checkpoint_is_the_latest_and_verifies(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    _write(store, 9, b"first")
    path = _write(store, 10, b"second")
    assert store.latest() == path == store.path(10)
    assert (tmp_path / "latest").read_text() == path.name + "\n"
    verify(path)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("call", "before", "survivor"),
    [
        ("mkdir", 1, 1),  # before the folder exists
        ("fsync", 0, 1),  # while the file list is written
        ("fsync", 1, 1),  # before the folder is on the disk
        ("rename", 0, 1),  # all written, not committed
        ("fsync", 2, 2),  # committed, the pointer still names the first
        ("replace", 0, 2),
        ("fsync", 4, 2),
    ],
)
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint_whole(
    tmp_path: Path, call: str, before: int, survivor: int
) -> None:
    store = CheckpointStore(tmp_path)
    _write(store, 1, b"first")
    assert _kill_writer(tmp_path, call, before) == -signal.SIGKILL
    latest = store.latest()
    assert latest == store.path(survivor)
    verify(latest)
    assert (latest / "tensors").read_bytes() == (b"first" if survivor == 1 else b"second")


def test_what_a_killed_writer_left_does_not_stop_the_next_one(tmp_path: Path) -> None:
    assert _kill_writer(tmp_path, "rename", 0) == -signal.SIGKILL
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    path = _write(store, 3, b"third")
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, "latest"}


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 10, 11]), (1, [11]), (3, [2, 10, 11])])
def test_the_newest_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    store = CheckpointStore(tmp_path, keep=keep)
    for step in (2, 10, 1, 11):
        _write(store, step, b"data")
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "latest",
        *(store.path(step).name for step in left),
    }


# Writes a second checkpoint, keeps one, and is killed while the first is half deleted.
_PRUNER = """
import os, shutil, signal, sys
from pathlib import Path
from fullshard_train.checkpoints.store import CheckpointStore

def killing(path):
    (path / "tensors").unlink()
    os.kill(os.getpid(), signal.SIGKILL)

shutil.rmtree = killing
store = CheckpointStore(Path(sys.argv[1]), keep=1)
store.begin(2)
store.commit(2, {})
"""


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_none_that_looks_whole(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    _write(store, 1, b"first")
    source = str(Path(fullshard_train.__file__).parents[1])
    command = [sys.executable, "-c", _PRUNER, str(tmp_path)]
    killed = subprocess.run(command, env={"PYTHONPATH": source}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert store.latest() == store.path(2)
    assert not store.path(1).exists()
    path = _write(store, 3, b"third")
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, "latest"}


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _write(store, 1, b"first")
    with pytest.raises(OSError, match="not empty"):
        _write(store, 1, b"other")
    assert (store.path(1) / "tensors").read_bytes() == b"first"


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    path = _write(CheckpointStore(tmp_path), 1, b"some tensors")
    damage(path / "tensors")
    with pytest.raises(TrainError, match="tensors is damaged"):
        verify(path)
    (path / "tensors").unlink()
    with pytest.raises(TrainError, match="tensors: No such file"):
        verify(path)
    (path / "files.json").write_text("{")
    with pytest.raises(TrainError, match=r"no readable files\.json"):
        verify(path)


def test_the_parts_of_a_check_cover_every_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folder = store.begin(1)
    names = [f"file{number}" for number in range(5)]
    for name in names:
        (folder / name).write_bytes(name.encode())
    path = store.commit(1, {name: checksum(folder / name) for name in names})
    for name in names:
        damage(path / name)
        found = 0
        for part in range(3):
            try:
                verify(path, part=part, parts=3)
            except TrainError:
                found += 1
        assert found == 1, name
        (path / name).write_bytes(name.encode())
