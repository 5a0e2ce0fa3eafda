"""The processes behind ``support.ranks``: started once, sent jobs, killed after a failure."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle
import pytest

from support.pool.messages import Job, Outcome, Report, Settle, Start
from support.pool.starting import RankProcess

START_TIMEOUT = 120.0  # seconds until every rank has imported torch and joined the group
GRACE = 5.0
# Each has a thread that wakes a hundred times a second: dozens of them, in each of four ranks, are
# more work than the tests. New ranks cost a tenth of a second.
MOST_PROCESS_GROUPS = 15
SEED = 1234
LOG_LINES = 40


class RanksFailed(AssertionError):
    """Some ranks of a job did not return.

    ``reports`` maps each rank to its `Report`; ``exit_codes`` maps the ranks that died to their
    exit code (negative: the signal); ``results`` maps the ranks that returned to their results.
    """

    def __init__(
        self, message: str, reports: Mapping[int, Report], exit_codes: Mapping[int, int]
    ) -> None:
        super().__init__(message)
        self.reports = dict(reports)
        self.exit_codes = dict(exit_codes)
        self.results = {
            rank: pickle.loads(report.payload)
            for rank, report in reports.items()
            if report.outcome is Outcome.RETURNED
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rank:
    """One rank process as the pool sees it."""

    process: RankProcess
    log: Path
    stacks: Path


class RankPool:
    """``world_size`` processes joined in one gloo group, waiting for jobs.

    ``grace``: seconds that the other ranks get once one has failed; ``timeout``: seconds that a
    rank waits for another one.
    """

    def __init__(self, world_size: int, *, grace: float = GRACE, timeout: float = 600.0) -> None:
        self.world_size = world_size
        self._grace, self._timeout = grace, timeout
        self._directory = tempfile.TemporaryDirectory(prefix="fullshard-ranks-")
        self._ranks = [self._start(rank) for rank in range(world_size)]
        self._log_starts = [0] * world_size
        self.closed = False
        try:
            self._expect(Outcome.READY, START_TIMEOUT, "start")
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int) -> _Rank:
        folder = Path(self._directory.name)
        log, stacks = folder / f"rank{rank}.log", folder / f"rank{rank}.stacks"
        log.touch()
        start = Start(
            rank=rank,
            world_size=self.world_size,
            store=folder / "store",
            stacks=stacks,
            log=log,
            environment=self._environment(rank),
            timeout=self._timeout,
        )
        return _Rank(process=RankProcess(start), log=log, stacks=stacks)

    def _environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set, this process's import path, and one thread per rank."""
        environment = dict(os.environ)
        if "lo" in (name for _, name in socket.if_nameindex()):
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.update(
            PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
            OMP_NUM_THREADS="1",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.world_size),
        )
        return environment

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: float,
    ) -> list[Any]:
        """What ``fn(*args, **kwargs)`` returned on each rank, in rank order.

        Raises `RanksFailed` when a rank raised, died or was not done after ``timeout`` seconds, or
        left ranks in different numbers of process groups, by which torch names the next ones; then,
        and after any other interruption, the pool is dead. So it is after a job that left more than
        `MOST_PROCESS_GROUPS`: its ranks have done their part.
        """
        __tracebackhide__ = True
        payload = _pickle_job(fn, args, kwargs)
        filters = cloudpickle.dumps(list(warnings.filters))
        job = pickle.dumps(Job(payload=payload, seed=SEED, warning_filters=filters))
        self._log_starts = [rank.log.stat().st_size for rank in self._ranks]
        try:
            self._send(job)
            reports = self._expect(Outcome.RETURNED, timeout, getattr(fn, "__name__", str(fn)))
            self._send(pickle.dumps(Settle()))
            settled = self._expect(Outcome.SETTLED, GRACE * 2, "the barrier after the job")
            counts = {rank: report.process_groups for rank, report in settled.items()}
            if len(set(counts.values())) > 1:
                told = f"the job left ranks in different numbers of process groups: {counts}"
                raise RanksFailed(told, settled, {})
        except BaseException:
            self.kill()
            raise
        if any(count > MOST_PROCESS_GROUPS for count in counts.values()):
            self.kill()
        skips = [report for report in reports.values() if report.outcome is Outcome.SKIPPED]
        if skips:
            pytest.skip(skips[0].text)
        return [pickle.loads(reports[rank].payload) for rank in range(self.world_size)]

    def _send(self, message: bytes) -> None:
        for rank in self._ranks:
            try:
                rank.process.pipe.send_bytes(message)
            except BrokenPipeError:
                continue  # the rank is dead; reading its pipe says so

    def _expect(self, wanted: Outcome, timeout: float, what: str) -> dict[int, Report]:
        """One report per rank, each ``wanted`` (or all skipped); else `RanksFailed`."""
        __tracebackhide__ = True
        reports = self._collect(timeout)
        outcomes = {report.outcome for report in reports.values()}
        if outcomes <= {wanted} or outcomes == {Outcome.SKIPPED}:
            return reports
        exit_codes = {
            rank: self._ranks[rank].process.exit_code
            for rank, report in reports.items()
            if report.outcome is Outcome.DIED
        }
        message = self._describe(what, timeout, reports, exit_codes)
        raise RanksFailed(message, reports, exit_codes)

    def _collect(self, timeout: float) -> dict[int, Report]:
        """One report per rank; what a rank that died or is stuck cannot say is said for it."""
        ranks = {rank.process.pipe: number for number, rank in enumerate(self._ranks)}
        waiting: set[Connection] = set(ranks)
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            for pipe in wait(list(waiting), max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                waiting.discard(pipe)
                report = _receive(pipe)
                reports[ranks[pipe]] = report
                if report.outcome in (Outcome.RAISED, Outcome.DIED):
                    deadline = min(deadline, time.monotonic() + self._grace)
            if time.monotonic() >= deadline:
                break
        stuck = [ranks[pipe] for pipe in waiting]
        for rank, stack in self._stacks(stuck).items():
            reports[rank] = Report(outcome=Outcome.STUCK, text=stack)
        return dict(sorted(reports.items()))

    def _stacks(self, numbers: list[int]) -> dict[int, str]:
        """The Python stacks of all threads of these ranks, through their SIGUSR1 handler."""
        for number in numbers:
            self._ranks[number].process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        stacks = dict.fromkeys(numbers, "")
        while time.monotonic() < deadline:
            fresh = {number: self._ranks[number].stacks.read_text() for number in numbers}
            if fresh == stacks and all(stacks.values()):
                break
            stacks = fresh
            time.sleep(0.05)  # the handler writes asynchronously; two equal reads mean it is done
        return stacks

    def _describe(
        self,
        what: str,
        timeout: float,
        reports: Mapping[int, Report],
        exit_codes: Mapping[int, int],
    ) -> str:
        good = [rank for rank, report in reports.items() if not _is_failure(report)]
        lines = [f"{what} failed on {len(reports) - len(good)} of {self.world_size} ranks"]
        if not any(report.outcome in (Outcome.RAISED, Outcome.DIED) for report in reports.values()):
            lines[0] += f": no answer within {timeout:g} s"
        for rank, report in reports.items():
            if not _is_failure(report):
                continue
            title = f"rank {rank}: {report.outcome.value}"
            if rank in exit_codes:
                title += f" (exit code {exit_codes[rank]})"
            lines += ["", f"---- {title} ----", report.text.rstrip()]
            log = self._log_tail(rank)
            if log:
                lines += [f"---- rank {rank}: last output ----", log]
        if good:
            lines += ["", f"ranks that did not fail: {good}"]
        return "\n".join(lines)

    def _log_tail(self, rank: int) -> str:
        with self._ranks[rank].log.open("rb") as log:
            log.seek(self._log_starts[rank])
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def kill(self) -> None:
        """End the rank processes and all they started, now."""
        self.closed = True
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.close()
        self._directory.cleanup()

    def pids(self) -> list[int]:
        """The process id of each rank."""
        return [rank.process.pid for rank in self._ranks]

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if not self.closed:
            self.kill()


def _is_failure(report: Report) -> bool:
    return report.outcome in (Outcome.RAISED, Outcome.DIED, Outcome.STUCK)


def _receive(pipe: Connection) -> Report:
    try:
        report = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return Report(outcome=Outcome.DIED)
    assert isinstance(report, Report)
    return report


def _pickle_job(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """The call by value: rank processes cannot import test modules, so the code itself travels."""
    target = fn
    while isinstance(target, functools.partial):
        target = target.func
    module = inspect.getmodule(target)
    if module is not None and not _is_importable(module.__name__):
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((fn, args, dict(kwargs)))
    except Exception as error:
        given = ", ".join(f"{name}: {type(value).__name__}" for name, value in kwargs.items())
        raise TypeError(
            f"{getattr(fn, '__name__', fn)} cannot be sent to the ranks ({given}): {error}. "
            "Arguments, fixtures and what the function refers to must be picklable; "
            "make the rest inside it."
        ) from error


def _is_importable(name: str) -> bool:
    """Whether a rank process can import this module: support and installed packages, not tests."""
    return name.partition(".")[0] in ("support", "fullshard", "fullshard_train", "torch")
