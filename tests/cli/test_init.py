"""``fullshard init``: its questions, and the files that it writes, which run as they are."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fullshard.cli.starting.answers import QUESTIONS, AnswerError, Answers, ask
from fullshard.cli.starting.writing import next_steps, text_of, write
from fullshard.preflight import plan
from fullshard_train.settings.config import load_config
from support.ranks import distributed

DEFAULTS = ask({}, lambda text, default: default)


def test_each_question_is_asked_once_unless_an_option_answers_it() -> None:
    asked: list[str] = []

    def answer(text: str, default: str) -> str:
        asked.append(text)
        return default

    found = ask({"precision": "bfloat16", "steps": 7, "kind": None}, answer)
    assert asked == [each.text for each in QUESTIONS if each.name not in ("precision", "steps")]
    assert (found.precision, found.steps, found.kind) == ("bfloat16", 7, "script")
    assert len(QUESTIONS) == 5


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kind": "notebook"}, "--kind 'notebook': use script or config"),
        ({"steps": "0"}, "--steps '0': use a number from 1 on"),
        ({"precision": "int8"}, "use float32 or bfloat16"),
        ({"model": "my model"}, "--model 'my model': use module:function, or example"),
    ],
)
def test_an_answer_that_means_nothing_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(AnswerError, match=says):
        ask(given, lambda text, default: default)


def test_a_file_that_exists_stays(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    with pytest.raises(AnswerError, match="exists; name another file"):
        write(DEFAULTS, tmp_path / "train.py")
    with pytest.raises(AnswerError, match="there is no folder"):
        write(DEFAULTS, tmp_path / "none" / "train.py")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(AnswerError, match="loop cannot be written: "):
        write(DEFAULTS, tmp_path / "loop")
    assert (tmp_path / "train.py").read_text() == "mine"


OWN = "import torch\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(16, 4))\n"


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("written_by_init", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _train(answers: Answers, folder: Path, steps: int) -> dict[int, float]:
    """Write a script and run it on this rank, whose process group is the pool's."""
    os.chdir(folder)
    if dist.get_rank() == 0:
        Path("own.py").write_text(OWN)
        write(answers, Path(f"script{steps}.py"))
    dist.barrier()
    group = [patch.object(dist, f"{name}_process_group") for name in ("init", "destroy")]
    with group[0], group[1], patch.object(sys, "path", ["", *sys.path]):
        _load(Path(f"script{steps}.py")).main()
    dist.barrier()
    lines = Path("runs/first/metrics.jsonl").read_text().splitlines()
    return {each["step"]: each["loss"] for each in map(json.loads, lines)}


def _answers(steps: int, model: str, precision: str, memory: str) -> Answers:
    return Answers(kind="script", model=model, precision=precision, memory=memory, steps=steps)


CASES = [
    ("example", "bfloat16", "tight"),
    ("own:build", "float32", "plenty"),
    pytest.param("example", "float32", "plenty", marks=pytest.mark.matrix),
    pytest.param("own:build", "bfloat16", "tight", marks=pytest.mark.matrix),
]


@pytest.mark.parametrize(("model", "precision", "memory"), CASES)
@distributed(2)
def test_a_script_runs_as_it_is_and_continues_from_its_checkpoint(
    model: str, precision: str, memory: str, tmp_path: Path
) -> None:
    before = os.getcwd()
    try:
        losses = _train(_answers(4, model, precision, memory), tmp_path, 4)
        assert list(losses) == [1, 2, 3, 4]
        longer = _train(_answers(6, model, precision, memory), tmp_path, 6)
        assert list(longer) == [1, 2, 3, 4, 5, 6]  # 5 and 6 were added
        assert longer[1] == losses[1]
        if model == "example":
            assert longer[6] < longer[1]
    finally:
        os.chdir(before)


def test_a_script_can_be_planned_and_memory_that_is_tight_takes_less(tmp_path: Path) -> None:
    peaks = []
    for memory in ("plenty", "tight"):
        path = tmp_path / f"{memory}.py"
        path.write_text(text_of(_answers(5, "example", "bfloat16", memory)))
        module = _load(path)
        batch = module.batch(0)
        found = plan(module.build_model, batch, module.loss, mesh=4, shard=module.shard)
        peaks.append(found.peak)
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("model", ["example", "digits", "models/llama"])
def test_a_configuration_is_one_that_the_trainer_takes(model: str, tmp_path: Path) -> None:
    answers = ask(
        {"kind": "config", "model": model, "memory": "tight", "precision": "bfloat16", "steps": 7},
        lambda text, default: default,
    )
    path = write(answers, tmp_path / "run.toml")
    assert tomllib.loads(path.read_text())["train"]["steps"] == 7
    config = load_config([path], [])
    assert config.train.activation_checkpointing
    assert config.parallel.param_dtype == "bfloat16"
    task = {"example": "text", "digits": "digits"}.get(model, "hf")
    assert config.run.task == task
    assert config.hf.model == (model if task == "hf" else "")
    assert str(path) in next_steps(answers, path)
