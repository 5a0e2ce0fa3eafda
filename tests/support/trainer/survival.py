"""A training run that is killed at random moments and resumed each time, and where it ends.

    PYTHONPATH=tests python tests/support/trainer/survival.py --seed 1 --kills 20

It must end where a run that nobody disturbs ends, bit for bit: the loss of every step, the held-out
losses, the weights. Half of the kills are SIGTERM, half SIGKILL; half hit the whole job, half one
rank of it; a few come while it starts. In between, the newest checkpoint must be whole, and a
SIGTERM in training must cost no step.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard_train.checkpoints.store import CheckpointStore, verify
from fullshard_train.commands.export import load_exported
from fullshard_train.reporting.metrics import read_metrics
from fullshard_train.reporting.run_folder import RunFolder
from support.trainer.jobs import TEXT, losses, settings
from support.trainer.launchers import Forked, Job, Launcher, Torchrun, send

PATIENCE = 120.0  # seconds for a start, or for an end


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill: what, when (a step and a bit, or 0 while starting), and what it left."""

    number: signal.Signals
    whole_job: bool
    step: int
    seconds: float
    left: int
    reached: int

    def __str__(self) -> str:
        whom = "job " if self.whole_job else "rank"
        when = f"in step {self.step:4}" if self.step else "while starting"
        lost = self.reached - self.left
        after = f"checkpoint after step {self.left:4}" if self.left else "no checkpoint yet"
        return f"{self.number.name} to the {whom} {when:14} -> {after}, {lost} steps to repeat"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The kills that a run survived, and whether it ended as the undisturbed run did."""

    kills: list[Kill]
    steps: int
    differing_losses: list[int]
    differing_weights: list[str]
    final: tuple[float, float]

    @property
    def same(self) -> bool:
        return (
            not self.differing_losses and not self.differing_weights and len(set(self.final)) == 1
        )


class _Run:
    """The run that is killed, in `folder`."""

    def __init__(self, launcher: Launcher, ranks: int, folder: Path, words: list[str]) -> None:
        self.launcher, self.ranks, self.folder = launcher, ranks, folder
        self.words = [*words, "--resume", "auto", "--out", str(folder)]
        self.store = CheckpointStore(RunFolder(root=folder).checkpoints)
        self.metrics = RunFolder(root=folder).metrics
        self.output = folder.with_name(f"{folder.name}.txt")

    def start(self) -> Job:
        return self.launcher(self.ranks, self.words, self.output)

    def to_the_end(self) -> None:
        job = self.start()
        try:
            code = job.wait(5 * PATIENCE)
        finally:
            job.kill()
        assert code == 0, self.output.read_text()

    def kill(self, plan: Kill, one: random.Random) -> Kill:
        """Starts the job, kills it as planned, and says what that left."""
        before = self.metrics.stat().st_ino if self.metrics.exists() else 0
        job = self.start()
        try:
            if plan.step:
                self._await(job, lambda: self._steps_since(before) >= plan.step)
            else:
                self._await(job, lambda: bool(job.ranks()))
            time.sleep(plan.seconds)
            assert job.running(), f"it ended by itself: {self.output.read_text()}"
            self._strike(job, plan, one)
            job.wait(PATIENCE)
        finally:
            job.kill()
        return self._aftermath(plan)

    def _aftermath(self, plan: Kill) -> Kill:
        newest = self.store.latest()
        left = 0
        if newest is not None:
            verify(newest)
            left = int(newest.name.removeprefix("step-"))
        steps = losses(read_metrics(self.metrics)) if self.metrics.exists() else {}
        reached = max(steps, default=0)
        if plan.number is signal.SIGTERM and plan.step:
            assert left == reached, (
                f"SIGTERM cost {reached - left} steps: {self.output.read_text()}"
            )
        return Kill(
            number=plan.number,
            whole_job=plan.whole_job,
            step=reached + 1 if plan.step else 0,
            seconds=plan.seconds,
            left=left,
            reached=max(reached, left),
        )

    def _strike(self, job: Job, plan: Kill, one: random.Random) -> None:
        if not plan.whole_job:
            send(one.choice(job.ranks() or [0]), plan.number)
        elif plan.number is signal.SIGTERM:
            job.terminate()
        else:
            job.kill()

    def _steps_since(self, before: int) -> int:
        """The last step that the new job recorded; it begins by replacing the file `before`."""
        if not self.metrics.exists() or self.metrics.stat().st_ino == before:
            return 0
        return max(losses(read_metrics(self.metrics)), default=0)

    def _await(self, job: Job, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not happened():
            assert job.running(), f"it ended by itself: {self.output.read_text()}"
            assert time.monotonic() < end, f"it is stuck: {self.output.read_text()}"
            time.sleep(0.002)


def survive(
    folder: Path,
    *,
    seed: int,
    kills: int,
    ranks: int = 2,
    launcher: Launcher = Torchrun,
    tell: Callable[[str], None] = print,
) -> Report:
    """Kills a run `kills` times at moments drawn from `seed`; compares its end with another's."""
    one = random.Random(seed)
    steps = 20 * (kills + 1)
    text = folder / "text.txt"
    text.write_bytes(TEXT)
    words = [*_settings(steps), "--data", str(text)]
    undisturbed = _Run(launcher, ranks, folder / "undisturbed", words)
    undisturbed.to_the_end()
    run = _Run(launcher, ranks, folder / "killed", words)
    found = []
    for plan in _plans(one, kills, steps):
        found.append(run.kill(plan, one))
        tell(f"{len(found):3}  {found[-1]}")
    run.to_the_end()
    return _compare(undisturbed, run, found, steps)


def _plans(one: random.Random, kills: int, steps: int) -> Iterable[Kill]:
    """The kills; each aims at a random step of its own part of the run, and a moment within it."""
    kinds = [(number, whole) for whole in (0, 1) for number in (signal.SIGTERM, signal.SIGKILL)]
    chosen = [kinds[place % len(kinds)] for place in range(kills)]
    one.shuffle(chosen)
    for place, (number, whole) in enumerate(chosen):
        starting = kills > len(kinds) and place % 6 == 5
        step = 1 + int((place + one.random()) * steps / (kills + 1))
        yield Kill(
            number=number,
            whole_job=bool(whole) or starting,
            step=0 if starting else step,
            seconds=one.uniform(0, 4.0 if starting else 0.03),
            left=0,
            reached=0,
        )


def _compare(undisturbed: _Run, run: _Run, kills: list[Kill], steps: int) -> Report:
    curves: list[dict[tuple[str, int], float]] = []
    weights: list[dict[str, torch.Tensor]] = []
    final: list[float] = []
    for each in (undisturbed, run):
        records = read_metrics(each.metrics)
        curves.append(
            {
                (kind, step): loss
                for kind in ("train", "held_out")
                for step, loss in losses(records, kind).items()
            }
        )
        weights.append(load_exported(RunFolder(root=each.folder).weights).state_dict())
        result: dict[str, Any] = json.loads(RunFolder(root=each.folder).result.read_text())
        final.append(result["held_out_loss"])
    assert len(curves[0]) >= steps
    places = curves[0].keys() | curves[1].keys()
    return Report(
        kills=kills,
        steps=steps,
        differing_losses=sorted(p[1] for p in places if curves[0].get(p) != curves[1].get(p)),
        differing_weights=[
            name for name, weight in weights[0].items() if not weight.equal(weights[1][name])
        ],
        final=(final[0], final[1]),
    )


def _settings(steps: int) -> list[str]:
    # Checkpoints so often that many kills come while one is written.
    return settings(
        train={"steps": steps, "evaluate_every": 25}, checkpoint={"every": 6, "keep": 2}
    )


def main() -> int:
    """Runs it, and says how it went; 0 if the run ended as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--fork", action="store_true", help="ranks without torchrun")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = survive(
            Path(folder),
            seed=options.seed,
            kills=options.kills,
            ranks=options.ranks,
            launcher=Forked if options.fork else Torchrun,
            tell=lambda line: print(line, flush=True),
        )
    print(f"{len(report.kills)} kills over {report.steps} steps on {options.ranks} ranks")
    print(f"final held-out loss: undisturbed {report.final[0]!r}, killed {report.final[1]!r}")
    print(f"steps whose loss differs: {report.differing_losses or 'none'}")
    print(f"weights that differ: {report.differing_weights or 'none'}")
    return 0 if report.same else 1


if __name__ == "__main__":
    sys.exit(main())
