"""A run that loses a host and gets it back, under torchrun's elastic restarts.

    sudo PYTHONPATH=tests python tests/support/trainer/drill.py        (or: nox -s drill)

Two network namespaces are two hosts of one rank each. When a checkpoint is there, the second one is
cut off and all its processes are killed: the first gets no closed socket, only silence. Its rank
gives up after --timeout, torchrun starts it again alone, and it goes on from the newest checkpoint.
Then the second host comes back and joins: torchrun stops the one rank, which saves, and starts two.
Every step must be done once, with the loss that an undisturbed run has there, up to rounding: sums
come in another order on one rank than on two.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fullshard_train.checkpoints.store import CheckpointStore
from fullshard_train.reporting.metrics import read_metrics
from fullshard_train.reporting.run_folder import RunFolder
from support.python import environment
from support.trainer.hosts import Host, NoHosts, two_hosts
from support.trainer.jobs import TEXT, losses, settings

PATIENCE = 180.0  # seconds for each part of the drill
STEPS = 1200
TIMEOUT = 10  # seconds that a rank waits for the others


@dataclass(frozen=True, kw_only=True)
class Drill:
    """What a drill found: losses by kind and step, of the run and of the undisturbed one.

    `lost` and `back` are the steps at which the second host went and came.
    """

    found: dict[tuple[str, int], float]
    expected: dict[tuple[str, int], float]
    lost: int
    back: int

    @property
    def furthest(self) -> float:
        """The largest relative difference of two losses of one step."""
        return max(abs(self.found[key] / value - 1) for key, value in self.expected.items())


class _Elastic:
    """The run on two hosts; either may go."""

    def __init__(self, hosts: list[Host], folder: Path, words: list[str]) -> None:
        self.hosts = hosts
        self.run = RunFolder(root=folder / "run")
        self.output = folder / "output.txt"
        self._words = [*words, "--timeout", str(TIMEOUT), "--resume", "auto"]
        self._words += ["--out", str(self.run.root)]

    def start(self, host: Host) -> subprocess.Popen[bytes]:
        """What the how-to page tells to start on a host."""
        options = [
            "--nnodes=1:2",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.hosts[0].address}:29500",
            "--rdzv-id=drill",
            # Namespaces share a host name, so neither can tell that the endpoint is itself.
            f"--rdzv-conf=is_host={int(host == self.hosts[0])},last_call_timeout=5",
            f"--local-addr={host.address}",
        ]
        launch = [sys.executable, "-m", "fullshard_train", "launch", *options, "--"]
        return host.start([*launch, *self._words], self.output)

    def step(self) -> int:
        """The last step that the metrics have; the file is cut when the run goes on."""
        if not self.run.metrics.exists():
            return 0
        return max(losses(read_metrics(self.run.metrics)), default=0)

    def saved(self) -> int:
        """The step of the newest checkpoint."""
        newest = CheckpointStore(self.run.checkpoints).latest()
        return 0 if newest is None else int(newest.name.removeprefix("step-"))

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not happened():
            if time.monotonic() > end:
                raise AssertionError(f"after {PATIENCE:.0f} s not yet {what}:\n{self.said()}")
            time.sleep(0.02)


def drill(folder: Path, tell: Callable[[str], object] = print) -> Drill:
    """Runs the drill in an empty folder.

    Raises:
        NoHosts: this machine makes none.
        AssertionError: a part of it did not happen in time.
    """
    text = folder / "text.txt"
    text.write_bytes(TEXT)
    words = [*_settings(), "--data", str(text)]
    with two_hosts() as hosts:
        run = _Elastic(hosts, folder, words)
        began = time.monotonic()

        def say(line: str) -> None:
            tell(f"{time.monotonic() - began:6.1f} s  step {run.step():5}  {line}")

        first = run.start(hosts[0])
        gone = run.start(hosts[1])
        run.wait_until(lambda: run.saved() >= 100 and run.step() > run.saved(), "a checkpoint")
        assert "over 2 rank(s)" in run.said(), run.said()
        lost = run.step()
        hosts[1].power_off()
        gone.wait(PATIENCE)
        say(f"the second host is gone; the newest checkpoint is of step {run.saved()}")
        run.wait_until(lambda: "over 1 rank(s)" in run.said(), "started again on one host")
        say("started again, on one rank")
        saved = run.saved()
        run.wait_until(lambda: run.saved() > saved, "a checkpoint on one host")
        hosts[1].power_on()
        second = run.start(hosts[1])
        say("the second host is back, and asks to join")
        run.wait_until(lambda: run.said().count("over 2 rank(s)") == 2, "both hosts again")
        back = run.step()
        say("started again, on two ranks")
        codes = [process.wait(PATIENCE) for process in (first, second)]
        say(f"done, exit codes {codes}")
        assert codes == [0, 0], run.said()
    return Drill(found=_losses(run.run), expected=_undisturbed(folder, words), lost=lost, back=back)


def _undisturbed(folder: Path, words: list[str]) -> dict[tuple[str, int], float]:
    """The losses of the same run in one process that nobody disturbs."""
    alone = RunFolder(root=folder / "alone")
    command = [sys.executable, "-m", "fullshard_train", *words, "--out", str(alone.root)]
    subprocess.run(command, check=True, capture_output=True, env=environment())
    return _losses(alone)


def _losses(run: RunFolder) -> dict[tuple[str, int], float]:
    records = read_metrics(run.metrics)
    return {
        (kind, step): loss
        for kind in ("train", "held_out")
        for step, loss in losses(records, kind).items()
    }


def _settings() -> list[str]:
    # Steps slow enough that the host is back before the run is over.
    return settings(
        model={"width": 64, "context": 64},
        train={"steps": STEPS, "batch": 12, "accumulate": 1, "evaluate_every": 100},
        checkpoint={"every": 50},
        optim={"learning_rate": 1e-4},  # at a higher one rounding grows over so many steps
    )


def main() -> int:
    """Runs it, and says how it went; 0 if every loss is as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = drill(Path(folder), tell=lambda line: print(line, flush=True))
        except NoHosts as error:
            print(f"skipped: {error}")
            return 0
    same = found.found.keys() == found.expected.keys()
    print(f"steps: {'each once' if same else 'not the same as in the undisturbed run'}")
    last = ("held_out", STEPS)
    print(f"last held-out loss: {found.found[last]!r}, undisturbed {found.expected[last]!r}")
    print(f"largest relative difference of a loss: {found.furthest:.1e}")
    return 0 if same and found.furthest < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
