"""Ray Train: two CPU workers, of which one fails, go on from a checkpoint with the same losses.

Run by ``nox -s clients``. What is compared are the losses of the same program on ranks of the
tests' pool, which nothing disturbs.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from support.members import MEMBERS, ROOT
from support.ranks import run_on_ranks
from support.tools import load_example

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train.torch")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what Ray says of its own parts
    pytest.mark.timeout(900),  # Ray starts a dozen processes for each run
]

LAUNCH = ROOT / "examples" / "launch"
STEPS, FAILS_AT = 30, 25

Worker = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def ray_train() -> Iterator[Any]:
    """The example's module, with a Ray of this machine that has room for two workers."""
    paths = [LAUNCH, *(member.folder / "src" for member in MEMBERS)]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    # Workers cannot import this file, so its functions go to them by value.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    sys.path.insert(0, str(LAUNCH))
    try:
        yield importlib.import_module("ray_train")
    finally:
        sys.path.remove(str(LAUNCH))
        ray.shutdown()


def _undisturbed(out: Path) -> None:
    """Runs on a rank of the pool."""
    out.mkdir(exist_ok=True)
    dist.barrier()
    load_example("launch/train").train(out, STEPS, lambda *_: None)


def _losses(out: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (out / "losses.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """Steps and losses of the program on two ranks without Ray."""
    out = tmp_path_factory.mktemp("pool") / "run"
    run_on_ranks(_undisturbed, 2, out, job_timeout=120)
    return _losses(out)


def _failing_once(how: str, then: Worker | None = None) -> Worker:
    """The example's worker, or another, whose rank 1 fails at a step of the first attempt."""

    def work(config: dict[str, Any]) -> None:
        train: Any = importlib.import_module("train")
        example: Any = importlib.import_module("ray_train")
        batch = train.batch

        def fails_once(step: int) -> Any:
            failed = Path(config["out"], "failed")
            if step == FAILS_AT and dist.get_rank() == 1 and not failed.exists():
                failed.touch()
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError("no rows")
            return batch(step)

        train.batch = fails_once
        (then or example.work)(config)

    return work


def _through_own_folders(config: dict[str, Any]) -> None:
    """As Ray's own guide does: each worker saves by torch into a folder of its own, Ray merges."""
    train: Any = importlib.import_module("train")

    class Written:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def result(self) -> Path:
            return Path(self.folder)

    def save(state: dict[str, Any], folder: Path) -> Written:
        own = tempfile.mkdtemp()
        dcp.save(state, checkpoint_id=own)
        return Written(own)

    def newest(out: Path) -> Path | None:
        found = ray.train.get_checkpoint()
        return Path(found.path) if found else None

    def report(step: int, loss: float, folder: Path) -> None:
        ray.train.report({"step": step, "loss": loss}, checkpoint=ray.train.Checkpoint(folder))

    train.async_save, train.newest = save, newest
    train.train(Path(config["out"]), config["steps"], report)


def _check(
    result: Any, out: Path, expected: list[tuple[int, float]], saved: tuple[int, ...]
) -> None:
    """Compare the steps of both attempts; the second one began after one of the ``saved`` steps."""
    found = _losses(out)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert (out / "failed").exists()
    first = found[FAILS_AT - 1][0]
    assert first - 1 in saved
    assert found == expected[: FAILS_AT - 1] + expected[first - 1 :]
    assert (result.metrics["step"], result.metrics["loss"]) == expected[-1]
    assert Path(result.checkpoint.path, ".metadata").exists()


def test_the_example_continues_after_a_killed_worker_with_the_losses_of_an_undisturbed_run(
    ray_train: Any, expected: list[tuple[int, float]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result = ray_train.make_trainer(out, STEPS, 2, _failing_once("killed")).fit()
    # What was saved at 20 is complete or not, but Ray had not heard of it.
    _check(result, out, expected, saved=(10, 20))
    assert Path(result.checkpoint.path) == out / f"step-{STEPS:06}"  # no copy of it


def test_checkpoints_that_ray_merges_from_the_workers_own_folders_are_continued(
    ray_train: Any, expected: list[tuple[int, float]], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    worker = _failing_once("raises", _through_own_folders)
    result = ray_train.make_trainer(out, STEPS, 2, worker).fit()
    _check(result, out, expected, saved=(10,))  # what Ray had heard of
