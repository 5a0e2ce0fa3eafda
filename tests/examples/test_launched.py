"""The program that every launcher starts: what it trains, where it continues, and its TrainJob."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from support.members import ROOT
from support.ranks import distributed
from support.tools import load_example

LAUNCH = ROOT / "examples" / "launch"


def _nothing(step: int, loss: float, folder: Path) -> None:
    pass


def _train(script: ModuleType, out: Path, steps: int, saved: Callable[..., None]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    script.train(out, steps, saved)
    dist.barrier()


def _losses(out: Path) -> list[tuple[int, float]]:
    """Steps and losses, in the order in which they were made."""
    lines = map(json.loads, (out / "losses.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def _unsharded(script: ModuleType, steps: int) -> list[float]:
    """The losses of the model without fullshard, on one process and all rows."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(1, steps + 1):
        rows = torch.randn(script.ROWS, 64, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(model(rows), rows[:, :4].argmax(dim=1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@distributed(2)
def test_a_run_that_a_signal_stops_continues_with_the_losses_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    script: Any = load_example("launch/train")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    _train(script, whole, 25, _nothing)
    losses = _losses(whole)
    assert [step for step, _ in losses] == list(range(1, 26))
    expected = _unsharded(script, 25)
    torch.testing.assert_close([loss for _, loss in losses], expected, rtol=1e-4, atol=1e-6)
    assert expected[-1] < 0.7 * expected[0]

    batch = script.batch

    def with_a_signal(step: int) -> torch.Tensor:
        if step == 13 and dist.get_rank() == 1:
            script.STOP.set()
        return batch(step)

    script.batch = with_a_signal
    _train(script, stopped, 25, _nothing)
    assert script.STOP.is_set()  # on both ranks: the exit code of each says so
    assert _losses(stopped) == losses[:13]
    script.batch = batch
    script.STOP.clear()
    _train(script, stopped, 25, _nothing)
    assert _losses(stopped) == losses


@distributed(2)
def test_a_run_continues_from_the_newest_complete_checkpoint_and_keeps_two(tmp_path: Path) -> None:
    script: Any = load_example("launch/train")
    seen = list[tuple[int, list[str]]]()

    def saved(step: int, loss: float, folder: Path) -> None:
        assert folder == tmp_path / f"step-{step:06}"
        script.keep_two(step, loss, folder)
        dist.barrier()
        seen.append((step, sorted(path.name for path in tmp_path.glob("step-*"))))

    _train(script, tmp_path, 30, saved)
    newer, two = ["step-000010", "step-000020"], ["step-000020", "step-000030"]
    assert seen == [(10, newer[:1]), (20, newer), (30, two)]
    before = _losses(tmp_path)
    if dist.get_rank() == 0:
        (tmp_path / "step-000030" / ".metadata").unlink()  # as a killed save leaves it
    _train(script, tmp_path, 30, saved)
    assert _losses(tmp_path) == before + before[20:]


@pytest.fixture
def job() -> dict[str, Any]:
    """The documents of the TrainJob's file by their kind."""
    documents = yaml.safe_load_all((LAUNCH / "trainjob.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_the_train_job_names_its_runtime_and_the_operator_finds_its_container(
    job: dict[str, Any],
) -> None:
    runtime, spec = job["TrainingRuntime"], job["TrainJob"]["spec"]
    assert spec["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    assert "torch" in runtime["spec"]["mlPolicy"]  # or the operator sets no PET_ variables
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert node["name"] == container["name"] == "node"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    trainer = spec["trainer"]
    assert int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]) == trainer["numProcPerNode"]
    out = {each["name"]: each["value"] for each in trainer["env"]}["OUT"]
    for path in (out, *trainer["args"]):
        assert path.startswith(mounts["shared"] + os.sep)


@pytest.mark.clients
@pytest.mark.parametrize("kind", ["TrainingRuntime", "TrainJob"])
def test_the_documents_are_of_the_published_schema(job: dict[str, Any], kind: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    schema = getattr(models, f"TrainerV1alpha1{kind}")
    # A field that the schema does not have would be dropped, one of another type is an error.
    assert schema.from_dict(job[kind]).to_dict() == job[kind]
    assert job[kind]["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    job[kind]["spec"]["nodes"] = 2
    assert schema.from_dict(job[kind]).to_dict() != job[kind]
