"""A run of several replica groups in processes of this machine, and the faults that strike it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from unittest import mock

import torch

from fullshard.elastic import Lighthouse
from support.elastic.member import Place, train
from support.elastic.moments import MOMENTS, arm

__all__ = ["ElasticRun", "Fault", "JoinFault"]

_WORLD = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank of a group, at a phase of its step.

    Attributes:
        kind: "kill" ends the process; "stop" stops it until the others have gone on.
    """

    kind: str
    group: str
    rank: int
    phase: str

    @classmethod
    def drawn(cls, generator: random.Random, ranks: dict[str, int]) -> Fault:
        group = generator.choice(sorted(ranks))
        return cls(
            kind=generator.choice(("kill", "kill", "stop")),
            group=group,
            rank=generator.randrange(ranks[group]),
            phase=generator.choice(("begin", "forward", "backward", "commit", "step")),
        )


@dataclass(frozen=True, kw_only=True)
class JoinFault:
    """A rank that is killed while a group joins.

    Attributes:
        joiner: the group that is started again.
        moment: of the join; see ``MOMENTS``.
        victim: "joiner"; "source", from which the state comes; "third", any other group.
        rank: of the victim.
    """

    joiner: str
    moment: str
    victim: str
    rank: int = 0

    @classmethod
    def drawn(cls, generator: random.Random, ranks: dict[str, int]) -> JoinFault:
        joiner = generator.choice(sorted(ranks))
        fault = cls(
            joiner=joiner,
            moment=generator.choice(MOMENTS),
            victim=generator.choice(("joiner", "source", "third")[: len(ranks)]),
        )
        return replace(fault, rank=generator.randrange(ranks[fault.group(ranks)]))

    def group(self, ranks: dict[str, int]) -> str:
        """The name of the victim: the first other group is the source."""
        others = [name for name in sorted(ranks) if name != self.joiner]
        return {"joiner": self.joiner, "source": others[0], "third": others[-1]}[self.victim]


def _keep_lighthouse(port: int, told: Connection) -> None:
    lighthouse = Lighthouse(port=port, min_groups=1, join_timeout=1.0, heartbeat_timeout=1.0)
    told.send(int(lighthouse.address.rpartition(":")[2]))
    signal.pause()


@dataclass
class _Rank:
    process: BaseProcess
    told: Connection
    phase: str = ""
    step: int = -1


@dataclass
class ElasticRun:
    """Replica groups that are started, struck, and started again as a launcher would.

    Args:
        folder: for records and logs; one file per rank.
        ranks: of each group.
        timeout: of the groups, in seconds.
        patience: seconds after which a run that does not move fails.
    """

    folder: Path
    ranks: dict[str, int]
    timeout: float = 4.0
    patience: float = 60.0
    between: torch.dtype | None = None
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        own = {"OMP_NUM_THREADS": "1", "RUST_LOG": "warn", "PYTHONPATH": path}
        _WORLD.set_forkserver_preload(["support.elastic.member", "torchft.coordination"])
        with mock.patch.dict(os.environ, own):
            forkserver.ensure_running()  # it finds modules by its environment alone
        self._port = 0
        self._lighthouse = self._started_lighthouse()
        self._until = _WORLD.Value("l", 1 << 60)
        self._armed: Synchronized[int] = _WORLD.Value("i", 0)
        self._starts = dict.fromkeys(self.ranks, 0)
        self._groups: dict[str, list[_Rank]] = {}
        self.restarts = 0
        self._began = time.monotonic()

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(self, *error: object) -> None:
        for group in list(self._groups):
            self.kill(group)
        self._lighthouse.kill()
        self._lighthouse.join()

    def _started_lighthouse(self) -> BaseProcess:
        told, theirs = _WORLD.Pipe(duplex=False)
        process = _WORLD.Process(target=_keep_lighthouse, args=(self._port, theirs), daemon=True)
        process.start()
        theirs.close()
        self._port = told.recv()
        return process

    def restart_lighthouse(self) -> None:
        """Kill the lighthouse, and start it at its address when all groups wait for it."""
        self._lighthouse.kill()
        self._lighthouse.join()
        while any(each.phase != "begin" for group in self._groups.values() for each in group):
            self.follow()
        self._lighthouse = self._started_lighthouse()

    def start(self, group: str) -> None:
        place = Place(
            group=group,
            rank=0,
            ranks=self.ranks[group],
            start=self._starts[group],
            lighthouse=f"http://127.0.0.1:{self._port}",
            folder=self.folder,
            timeout=self.timeout,
            between=self.between,
        )
        self._starts[group] += 1
        started = []
        for rank in range(self.ranks[group]):
            told, theirs = _WORLD.Pipe(duplex=False)
            arguments = (replace(place, rank=rank), theirs, self._until, self._armed)
            process = _WORLD.Process(target=train, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append(_Rank(process, told))
        self._groups[group] = started

    def kill(self, group: str) -> None:
        for each in self._groups.pop(group, ()):
            with suppress(ProcessLookupError):
                os.kill(each.process.pid or 0, signal.SIGKILL)
            each.process.join()
            each.told.close()

    def step_of(self, group: str) -> int:
        """The last step that all ranks of a group have committed since they started; -1 if none."""
        return min((each.step for each in self._groups.get(group, ())), default=-1)

    @property
    def furthest(self) -> int:
        return max(map(self.step_of, self.ranks))

    def note(self, text: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:6.2f} s  step {self.furthest:4}  {text}")

    def together(self, steps: int) -> bool:
        """Whether every group is alive and has committed one of the last ``steps`` steps."""
        return min(map(self.step_of, self.ranks)) > max(self.furthest - steps, -1)

    def follow(self) -> None:
        """Take the next messages; start groups again that lost a rank."""
        ranks = {r.told: r for group in self._groups.values() for r in group}
        ended = {r.process.sentinel: r for r in ranks.values()}
        ready = wait([*ranks, *ended], timeout=self.patience)
        if not ready:
            raise AssertionError(f"nothing moved for {self.patience} s:\n" + "\n".join(self.log))
        for each in ready:
            if each in ranks:
                self._take(ranks[each])
        for group, members in list(self._groups.items()):
            codes = [each.process.exitcode for each in members]
            if any(code not in (None, 0) for code in codes):
                self.note(f"{group} is started again, its ranks ended with {codes}")
                self.kill(group)
                self.restarts += 1
                self.start(group)

    def _take(self, rank: _Rank) -> None:
        with suppress(EOFError, OSError):
            while rank.told.poll():
                rank.phase, step = rank.told.recv()
                if rank.phase == "step":
                    rank.step = step
                    return
                if rank.phase != "begin":
                    return

    def strike(self, fault: Fault, *, steps: int = 3) -> None:
        """Wait for the phase, strike, and wait until all groups are together again."""
        rank = self._groups[fault.group][fault.rank]
        while rank.phase != fault.phase:
            self.follow()
            rank = self._groups[fault.group][fault.rank]
        self.note(f"{fault.kind} {fault.group}{fault.rank} at {fault.phase}")
        pid = rank.process.pid or 0
        if fault.kind == "kill":
            os.kill(pid, signal.SIGKILL)
            rank.process.join()
        else:
            os.kill(pid, signal.SIGSTOP)
            others = [name for name in self.ranks if name != fault.group]
            goal = self.furthest + steps
            while max(map(self.step_of, others)) < goal:
                self.follow()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.meet_again(steps)

    def meet_again(self, steps: int = 3) -> None:
        """Wait until all groups have gone on together for some steps."""
        self.follow()
        goal = self.furthest + steps
        while self.furthest < goal or not self.together(steps):
            self.follow()
        self.note("all together")

    def fail_join(self, fault: JoinFault) -> None:
        """Start a group again, kill a rank at a moment of its join, wait until all are together."""
        arm(self._armed, fault.moment)
        self.kill(fault.joiner)
        self.start(fault.joiner)
        stopped: list[_Rank] = []
        while not stopped:
            self.follow()
            ranks = [each for group in self._groups.values() for each in group]
            stopped = [each for each in ranks if each.phase == fault.moment]
        _wait_until_stopped(stopped[0].process.pid or 0)  # else it would miss SIGCONT
        victim = self._groups[fault.group(self.ranks)][fault.rank]
        self.note(f"kill {fault.group(self.ranks)}{fault.rank}, {fault}")
        os.kill(victim.process.pid or 0, signal.SIGKILL)
        victim.process.join()
        with suppress(ProcessLookupError):
            os.kill(stopped[0].process.pid or 0, signal.SIGCONT)
        self.meet_again()

    def finish(self) -> None:
        self._until.value = self.furthest + 5
        while not all(
            each.process.exitcode == 0 for group in self._groups.values() for each in group
        ):
            self.follow()


def _wait_until_stopped(pid: int) -> None:
    """Wait for a process that told that it stops itself; return if it has ended."""
    stat = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        while stat.read_text().rpartition(") ")[2][:1] not in ("T", "Z"):
            time.sleep(0.001)
