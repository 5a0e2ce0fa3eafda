"""Exported weights: the unsharded model that reads them is the model that was trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from fullshard.sharding import full_state_dict
from fullshard_train.cli import main
from fullshard_train.commands.export import export_checkpoint, export_weights, load_exported
from fullshard_train.errors import TrainError
from fullshard_train.settings.config import Config
from fullshard_train.task import Task
from support.products import few
from support.ranks import run_on_ranks
from support.trainer.jobs import fit, full_weights, small_config, small_task, small_trainer

CONFIGS = {
    "tied": small_config(),
    "untied": small_config(model={"tied": False}),
    "digits": small_config(
        run={"task": "digits"},
        digits={"channels": 3, "layers": 1, "width": 12, "heads": 2},
    ),
}


def _train_and_export(config: Config, folder: Path) -> dict[str, Any]:
    trainer = small_trainer(config)
    fit(trainer, folder)
    weights = full_state_dict(trainer.model)
    if trainer.world.is_main:
        export_weights(folder / "model.safetensors", weights, config)
    return {"weights": full_weights(trainer), "loss": trainer.evaluate().loss}


def _loss(task: Task, model: torch.nn.Module) -> float:
    batch = task.evaluation_rows(range(task.held_out_rows))
    with torch.no_grad():
        logits = model(batch.inputs)
    return functional.cross_entropy(logits.flatten(0, -2), batch.targets.flatten()).item()


@pytest.mark.parametrize("name", few(CONFIGS, "tied", "digits"))
def test_both_ways_of_export_give_the_unsharded_model_what_was_trained(
    tmp_path: Path, name: str
) -> None:
    config = CONFIGS[name]
    trained = run_on_ranks(_train_and_export, 2, config, tmp_path)[0]
    later = tmp_path / "later" / "exported.safetensors"
    newest = tmp_path / "checkpoints" / "step-00000004"
    assert export_checkpoint(tmp_path, later) == newest
    (tmp_path / "other").touch()
    usual = (tmp_path / "other").stat().st_mode
    for path in (tmp_path / "model.safetensors", later):
        assert path.stat().st_mode == usual  # readable for whom the umask lets
        model = load_exported(path)
        found = dict(model.named_parameters())
        assert found.keys() == trained["weights"].keys() == load_file(path).keys()
        for key, weight in trained["weights"].items():
            assert found[key].equal(weight), key
        assert math.isclose(_loss(small_task(config), model), trained["loss"], rel_tol=1e-6)
    tied = [name for name in model.state_dict() if name not in found]
    assert tied == (["output.weight"] if name == "tied" else [])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A run of four steps on two ranks, in `tmp_path / "run"`."""
    run_on_ranks(_train_and_export, 2, small_config(), tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step-00000002"


def test_the_export_command_writes_one_file_and_refuses_to_write_over_one(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    assert main(["export", str(checkpoint), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: the weights of {checkpoint}, read back and equal\n"
    data = out.read_bytes()
    assert main(["export", str(checkpoint), str(out)]) == 2
    assert "is there already, and nothing is overwritten" in capsys.readouterr().err
    assert out.read_bytes() == data
    newest = load_file(tmp_path / "run" / "model.safetensors")
    assert not load_file(out)["embedding.weight"].equal(newest["embedding.weight"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gone", "out.safetensors"], "resume gone: no checkpoint there"),
        (["gone"], "the following arguments are required: file; see --help"),
        (["{checkpoint}", "{checkpoint}/position.json/out"], "export {checkpoint}/position.json"),
    ],
)
def test_an_export_that_cannot_be_is_one_line(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", *(word.format(checkpoint=checkpoint) for word in words)]) == 2
    error = capsys.readouterr().err
    assert told.format(checkpoint=checkpoint) in error
    assert error.count("\n") == 1


def test_a_file_that_was_not_exported_here_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(TrainError, match="not exported by this trainer"):
        load_exported(path)


def test_a_file_that_lacks_a_weight_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    source, path = tmp_path / "run" / "model.safetensors", tmp_path / "less.safetensors"
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
    weights = load_file(source)
    del weights["norm.weight"]
    save_file(weights, path, metadata=metadata)
    with pytest.raises(TrainError, match=r"do not fit the model of their config: norm\.weight"):
        load_exported(path)
