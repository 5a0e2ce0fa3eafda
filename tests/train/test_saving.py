"""Background checkpoints: of the moment they were begun, one at a time, errors told to all."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fullshard.checkpoint.saving import writing
from fullshard_train.checkpoints.checkpoint import read_position
from fullshard_train.checkpoints.saving import Saver
from fullshard_train.checkpoints.store import CheckpointStore, verify
from fullshard_train.errors import TrainError
from fullshard_train.reporting.metrics import NoMetrics
from fullshard_train.reporting.progress import Progress
from fullshard_train.training.trainer import Outputs, Trainer
from support.ranks import distributed
from support.trainer.jobs import fit, full_weights, small_config, small_trainer


class _HeldWriter(FileSystemWriter):
    """Writes when it is let."""

    release: threading.Event

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.release.wait(60)
        return super().write_data(plan, planner)


class _FullDisk(FileSystemWriter):
    """Has no room for the checkpoint after step 4 on rank 1."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1 and str(self.path).endswith("4"):
            raise OSError(28, "No space left on device")
        return super().write_data(plan, planner)


def _write_with(monkeypatch: pytest.MonkeyPatch, writer: type[FileSystemWriter]) -> None:
    monkeypatch.setattr(writing, "FileSystemWriter", writer)


def _outputs(trainer: Trainer, store: CheckpointStore) -> Outputs:
    progress = Progress(total=trainer.config.train.steps, done=0, item="bytes", shown=False)
    return Outputs(store=store, metrics=NoMetrics(), progress=progress)


@distributed(2)
def test_a_checkpoint_holds_the_weights_of_the_moment_it_was_begun(tmp_path: Path) -> None:
    trainer, store = small_trainer(small_config()), CheckpointStore(tmp_path)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _HeldWriter.release = threading.Event()
        _write_with(monkeypatch, _HeldWriter)
        before = full_weights(trainer)
        with Saver(store, trainer.world, background=True) as saver:
            trainer.save(_outputs(trainer, store), saver)
            assert store.latest() is None
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    parameter.fill_(7.0)
            _HeldWriter.release.set()
    path = store.path(0)
    trainer.resume(path, read_position(path))
    for name, weight in full_weights(trainer).items():
        assert weight.equal(before[name]), name


@distributed(2)
def test_a_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    # Beginning one clears away what is unfinished, so two at a time would not both become whole.
    trainer, store = small_trainer(small_config()), CheckpointStore(tmp_path)
    with Saver(store, trainer.world, background=True) as saver:
        for _ in range(3):
            trainer.save(_outputs(trainer, store), saver)
            trainer.step += 1
    for step in range(3):
        verify(store.path(step))


@distributed(2)
@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_one_rank_ends_the_run_on_all_and_keeps_the_checkpoint_before(
    tmp_path: Path, background: bool
) -> None:
    trainer = small_trainer(
        small_config(train={"steps": 60}, checkpoint={"background": background})
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        _write_with(monkeypatch, _FullDisk)
        with pytest.raises(TrainError) as raised:
            fit(trainer, tmp_path)
    assert re.fullmatch(
        r"the checkpoint after step 4 cannot be written: rank 1: OSError: \[Errno 28\] No space"
        r" left on device: .*\.distcp: \d+ bytes are to be written, and \d+ bytes and \d+ files "
        r"are free\. Free some space, or write elsewhere",
        str(raised.value),
    )
    reached: list[Any] = [None, None]
    dist.all_gather_object(reached, trainer.step)
    assert reached[0] == reached[1] < 60
    newest = CheckpointStore(tmp_path / "checkpoints").latest()
    assert newest is not None and newest.name == "step-00000002"
    verify(newest)


@distributed(2)
@pytest.mark.parametrize(("keep", "left"), [(0, [2, 4, 6]), (1, [6]), (2, [4, 6])])
def test_a_run_keeps_as_many_checkpoints_as_it_was_told(
    tmp_path: Path, keep: int, left: list[int]
) -> None:
    fit(small_trainer(small_config(train={"steps": 6}, checkpoint={"keep": keep})), tmp_path)
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder)
    names = {"latest", *(store.path(step).name for step in left)}
    assert {path.name for path in folder.iterdir()} == names
