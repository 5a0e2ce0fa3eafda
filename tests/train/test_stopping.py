"""Signals: noted once, agreed on by all ranks, and a run that stops is a run that can go on."""

from __future__ import annotations

import gzip
import json
import queue
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from fullshard_train.checkpoints.checkpoint import read_position, resolve
from fullshard_train.checkpoints.store import verify
from fullshard_train.ranks.stopping import ECHO_SECONDS, StopRequest, exit_code, watch_signals
from fullshard_train.training.profiling import Profiled
from fullshard_train.training.trainer import Trainer
from support.products import few
from support.python import environment
from support.ranks import distributed
from support.trainer.jobs import (
    fit,
    full_weights,
    losses,
    run,
    small_config,
    small_trainer,
    untimed,
)

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class _Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_aborts_and_an_echo_of_the_first_does_not(second: signal.Signals) -> None:
    clock, codes = _Clock(), list[int]()
    request = StopRequest(clock=clock, abort=codes.append)
    assert request.number == 0
    request.receive(signal.SIGTERM)
    clock.now += ECHO_SECONDS
    request.receive(second)
    assert codes == []
    clock.now += 0.001
    request.receive(second)
    assert codes == [exit_code(second)]
    assert request.number == signal.SIGTERM


def test_the_exit_code_is_what_a_shell_reports_for_the_signal() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # A process started in the background inherits an ignored SIGINT; Python takes it back.
        default = f"import signal as s; s.signal({int(number)}, s.SIG_DFL)"
        killed = f'{sys.executable} -c "{default}; s.raise_signal({int(number)})"; exit $?'
        assert subprocess.run(["sh", "-c", killed], check=False).returncode == exit_code(number)


class _Queued(StopRequest):
    """A request that a test waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.received: queue.Queue[int] = queue.Queue()

    def receive(self, number: int) -> None:
        super().receive(number)
        self.received.put(number)


def test_signals_are_watched_for_as_long_as_asked_and_then_as_before() -> None:
    handlers = [signal.getsignal(number) for number in WATCHED]
    request = _Queued()
    with watch_signals(request):
        signal.raise_signal(signal.SIGINT)
        assert request.received.get(timeout=60) == signal.SIGINT
        signal.raise_signal(signal.SIGTERM)
        assert request.received.get(timeout=60) == signal.SIGTERM
        signal.raise_signal(signal.SIGUSR1)
        assert request.received.get(timeout=60) == signal.SIGUSR1
    assert request.number == signal.SIGINT
    assert [signal.getsignal(number) for number in WATCHED] == handlers


# A program whose main thread never runs a Python instruction again: it waits for itself.
_STUCK = """
import ctypes, itertools
from fullshard_train.ranks.stopping import StopRequest, watch_signals

clock = itertools.count(step=60)
lock, library = ctypes.create_string_buffer(128), ctypes.CDLL(None)
with watch_signals(StopRequest(clock=lambda: next(clock))):
    print("ready", flush=True)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)
"""


def test_a_second_signal_ends_a_process_that_waits_for_others() -> None:
    command = [sys.executable, "-c", _STUCK]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


class _AtStep(StopRequest):
    """A request that comes in at the n-th time the loop asks."""

    def __init__(self, asked: int) -> None:
        super().__init__()
        self._left = asked

    @property
    def number(self) -> int:
        self._left -= 1
        return signal.SIGTERM if self._left < 0 else 0


@distributed(2)
@pytest.mark.parametrize(
    ("done", "background"),
    few([(1, False), (1, True), (2, True), (4, True)], (1, False), (2, True), together=True),
)
def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_can_go_on(
    tmp_path: Path, done: int, background: bool
) -> None:
    # Every second step evaluates and writes a checkpoint anyway; log_every leaves losses behind.
    config = small_config(train={"log_every": 3}, checkpoint={"background": background})
    whole = run(config, tmp_path / "whole")
    trainer = small_trainer(config)
    folder = tmp_path / "stopped"
    request = _AtStep(done) if dist.get_rank() == 1 else None
    assert fit(trainer, folder, request) == signal.SIGTERM
    assert trainer.step == done
    checkpoint = resolve(folder)
    verify(checkpoint)
    assert read_position(checkpoint).step == done
    assert list(losses(untimed(folder / "metrics.jsonl"))) == list(range(1, done + 1))
    dist.barrier()
    again = small_trainer(config)
    again.resume(checkpoint, read_position(checkpoint))
    assert fit(again, folder) == 0
    records = untimed(folder / "metrics.jsonl")
    for kind in ("train", "held_out"):
        assert losses(records, kind) == losses(whole.records, kind)
    for name, weight in full_weights(again).items():
        assert weight.equal(whole.weights[name]), name


@distributed(2)
def test_a_signal_before_the_first_step_stops_without_a_checkpoint(tmp_path: Path) -> None:
    trainer = small_trainer(small_config())
    request = _AtStep(0) if trainer.world.is_main else None
    assert fit(trainer, tmp_path, request) == signal.SIGTERM
    assert trainer.step == 0
    assert not (tmp_path / "checkpoints").exists()


def _steps_in(trace: Path) -> set[str]:
    with gzip.open(trace, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    return {name for name in names if isinstance(name, str) and re.fullmatch(r"step \d+", name)}


@distributed(2)
def test_a_signal_among_profiled_steps_leaves_their_trace_and_the_rest_comes_beside_it(
    tmp_path: Path,
) -> None:
    config = small_config(train={"profile_steps": "2:4"})

    def profiled_trainer() -> Trainer:
        trainer = small_trainer(config)
        profiled = Profiled(trainer, tmp_path / "profile")
        trainer.around_update.append(profiled.around)
        trainer.at_end.append(profiled.end)
        return trainer

    request = _AtStep(3) if dist.get_rank() == 1 else None
    assert fit(profiled_trainer(), tmp_path, request) == signal.SIGTERM
    again = profiled_trainer()
    checkpoint = resolve(tmp_path)
    again.resume(checkpoint, read_position(checkpoint))
    assert fit(again, tmp_path) == 0
    dist.barrier()
    for rank in range(2):
        assert _steps_in(tmp_path / "profile" / f"rank-{rank}.json.gz") == {"step 2", "step 3"}
        assert _steps_in(tmp_path / "profile" / f"rank-{rank}-from-4.json.gz") == {"step 4"}
