"""The job that a fault strikes: a small model, trained, saved and restarted as users do it."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

from fullshard.checkpoint import (
    MemoryCheckpoints,
    PendingSave,
    SaveError,
    async_save,
    check_checkpoint,
)
from fullshard.checkpoint.memory import sending
from fullshard.checkpoint.memory.contents import Contents
from fullshard.checkpoint.saving import writing
from fullshard.insight import IntegrityChecks, IntegrityPolicy, SlowRanks
from fullshard.optim import clip_grad_norm_
from fullshard.policies import MixedPrecisionPolicy
from fullshard.samehost import set_shared_memory
from fullshard.sharding import fully_shard
from support.campaign.faults import SAVED_AT, STEPS, Fault
from support.elastic.faults import (
    FAULT,
    DamagedAllGather,
    DamagedReduceScatter,
    damageable,
    strike_at_rest,
)

__all__ = ["PLANTED", "SCHEDULED", "run_job"]

PLANTED = "a planted fault"
SCHEDULED = Path("/proc/self/schedstat")
WIDTH = 24
DELAY = 0.25
"""Seconds in a step of a slow rank; a step takes a tenth of this."""


class _Trap:
    """Strikes once, where and when the fault says."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.step = -1
        self.armed = fault.kind != "none" and dist.get_rank() == fault.victim

    def __call__(self, place: str) -> None:
        passed = place == self.fault.place and self.step >= self.fault.step
        if self.armed and passed and self.fault.kind in _STRIKES:
            self.armed = self.fault.kind == "slow rank"
            _STRIKES[self.fault.kind](self.fault)


def _raise(_: Fault) -> None:
    raise RuntimeError(PLANTED)


def _stop(fault: Fault) -> None:
    awake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", awake], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _shift_clock(fault: Fault) -> None:
    now, shift = time.time, 86400.0 if fault.seed % 2 else -86400.0
    mock.patch.object(time, "time", lambda: now() + shift).start()


def _limit_files(fault: Fault) -> None:
    used = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + fault.seed % 4, hard))


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(_: Fault) -> None:
    os._exit(3)


def _interrupt(_: Fault) -> None:
    raise KeyboardInterrupt


def _delay(_: Fault) -> None:
    time.sleep(DELAY)  # the delay is what is tested


def _own_clock() -> int:
    """Return nanoseconds, without those in which this thread waited for a processor.

    So a rank is not called slow because of other processes of the machine.
    """
    while True:
        waited = int(SCHEDULED.read_text().split()[1])
        now = time.perf_counter_ns()
        if int(SCHEDULED.read_text().split()[1]) == waited:
            return now - waited


_STRIKES: dict[str, Callable[[Fault], None]] = {
    "exception": _raise,
    "exception in a save": _raise,
    "interrupt": _interrupt,
    "exit": _exit,
    "kill": _kill,
    "pause": _stop,
    "clock": _shift_clock,
    "open files": _limit_files,
    "lost host": _kill,
    "two neighbours lost": _kill,
    "slow rank": _delay,
}


class _Block(nn.Module):
    def __init__(self, trap: _Trap, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.trap, self.checkpointed = trap, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x).relu()
        self.trap("forward")
        out: torch.Tensor = self.second(hidden)
        return out


def _sharded_model(fault: Fault, trap: _Trap) -> Any:
    settings = fault.settings
    torch.manual_seed(0)
    blocks = [_Block(trap, settings.checkpointed) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 1))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if settings.bfloat16 else None)
    for index, block in enumerate(blocks):
        if fault.place == "computed gradients":
            damageable(block, f"{index + 1}.")
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    middle = blocks[1]
    middle.register_forward_pre_hook(lambda *_: trap("forward pre-hook"))
    middle.register_forward_hook(lambda *_: trap("forward hook"))
    middle.register_full_backward_hook(lambda *_: trap("module's backward hook"))
    middle.first.weight.register_post_accumulate_grad_hook(lambda _: trap("gradient hook"))
    model.register_state_dict_post_hook(lambda *_: trap("state dict"))
    return model


def _batch(step: int, micro: int) -> torch.Tensor:
    seed = 1000 * step + 10 * micro + dist.get_rank()
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def _backward(model: Any, inputs: torch.Tensor, trap: _Trap, share: int) -> float:
    def keep(tensor: torch.Tensor) -> torch.Tensor:
        trap("saved tensor")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(inputs)
        out.register_hook(lambda _: trap("tensor hook"))
        loss = (out.float().squeeze(1) - inputs.square().mean(1)).square().mean() / share
    trap("loss")
    loss.backward()
    trap("after backward")
    return float(loss.detach())


@contextmanager
def _saves_pass(trap: _Trap) -> Iterator[None]:
    """Let the thread of a save pass the trap before it writes, and before it commits."""
    write, commit = writing._write_files, writing._commit
    copy, exchange = Contents.copy_to, sending._exchange

    def write_files(*args: Any) -> Any:
        trap("write")
        return write(*args)

    def commit_all(*args: Any) -> Any:
        trap("commit")  # the first rank alone commits
        return commit(*args)

    def copy_to(*args: Any) -> None:
        trap("copy")
        copy(*args)

    def send(*args: Any) -> None:
        trap("send")
        exchange(*args)

    with (
        mock.patch.object(Contents, "copy_to", copy_to),
        mock.patch.object(sending, "_exchange", send),
        mock.patch.object(writing, "_write_files", write_files),
        mock.patch.object(writing, "_commit", commit_all),
    ):
        yield


class _Saves:
    """Saves beside training; a save to files that failed is noted, and training goes on."""

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.folder, self.failed = folder, list[str]()
        self._loads = fault.kind != "two jobs"  # each rank would see what the other job has saved
        self._pending: PendingSave | None = None
        self._memory: MemoryCheckpoints | None = None
        self._steps = {*SAVED_AT, fault.settings.steps - 1}
        if fault.settings.hosts:
            host = fault.settings.hosts[dist.get_rank()]
            path = folder.parent / "memory" / str(host)
            self._memory = MemoryCheckpoints("campaign", host=host, folder=path)
        else:
            self._steps.discard(STEPS - 1)

    def load(self, model: Any, optimizer: Any) -> tuple[int, str]:
        """Load what the job saved, if anything; return the next step, and where it was."""
        saved = self._loads and (self.folder / ".metadata").exists()
        if saved:
            check_checkpoint(self.folder)
        elif self._memory is None:
            return 0, "nowhere"
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        source = "memory"
        if self._memory is None or self._memory.restore(state) is None:
            if not saved:
                optimizer.state.clear()  # torch has filled it
                return 0, "nowhere"
            source = "files"
            dcp.load(state, checkpoint_id=self.folder)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **parts)
        return state["step"] + 1, source

    def save(self, model: Any, optimizer: Any, step: int) -> None:
        if self._memory is None and step not in self._steps:
            return
        self.wait()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": step}
        if self._memory is not None:
            self._memory.save(step, state)
        if step in self._steps:
            self._pending = async_save(state, self.folder)

    def wait(self) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except SaveError as error:
            if error.lost:
                raise
            self.failed.append(str(error))

    def end(self) -> None:
        self.wait()
        if self._memory is not None:
            self._memory.purge()


def _digest(model: Any, optimizer: Any) -> str:
    """Return a digest of this rank's shards of parameters and optimizer state, every byte."""
    sha = hashlib.sha256()
    for param in model.parameters():
        for value in (param, *optimizer.state[param].values()):
            local = value.to_local() if hasattr(value, "to_local") else value
            sha.update(local.detach().contiguous().numpy().tobytes())
    return sha.hexdigest()


def _train(fault: Fault, folder: Path) -> dict[str, Any]:
    trap = _Trap(fault)
    set_shared_memory(fault.settings.shared_memory)
    model = _sharded_model(fault, trap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: trap("optimizer pre-hook"))
    optimizer.register_step_post_hook(lambda *_: trap("optimizer post-hook"))
    saves = _Saves(fault, folder)
    first, source = saves.load(model, optimizer)
    checks = None
    if fault.settings.checked:
        checks = IntegrityChecks(model, optimizer, IntegrityPolicy(every=1))
        checks.all_gather, checks.reduce_scatter = DamagedAllGather, DamagedReduceScatter
    watch = SlowRanks(clock=_own_clock) if fault.kind == "slow rank" else None
    losses, loss = list[float](), 0.0

    def compute() -> None:
        nonlocal loss
        micro_batches, loss = fault.settings.micro_batches, 0.0
        for micro in range(micro_batches):
            trap("batch")
            model.set_requires_gradient_sync(micro == micro_batches - 1)
            loss += _backward(model, _batch(trap.step, micro), trap, micro_batches)

    with _saves_pass(trap):
        for step in range(first, fault.settings.steps):
            trap.step = step
            if step == fault.step and watch is not None:
                watch.start()
            if checks is not None:
                if trap.armed and step == fault.step:
                    FAULT.__init__(fault.place, fault.victim, fault.tensor, fault.seed)  # type: ignore[misc]  # a new fault
                    strike_at_rest(model, optimizer)
                checks.begin()
                checks.twice(compute)
            else:
                compute()
            trap("clip")
            norm = clip_grad_norm_(model, 1.0)
            if checks is not None:
                checks.before_update(loss=loss, norm=norm)
            optimizer.step()
            optimizer.zero_grad()
            if checks is not None:
                checks.end()
            losses.append(loss)
            saves.save(model, optimizer, step)
        saves.end()
    slow = () if watch is None else watch.report().slow
    return {
        "first": first,
        "source": source,
        "losses": losses,
        "digest": _digest(model, optimizer),
        "failed_saves": saves.failed,
        "slow": [(each.rank, each.phase) for each in slow],
    }


def run_job(fault: Fault, folder: Path, checkpoint_folder: Path) -> None:
    """Train on this rank, write how it ended into the folder, and end the process.

    The process ends as the interpreter would end it after an error that nothing catches.
    """
    try:
        ending = _train(fault, checkpoint_folder)
    except BaseException as error:
        traceback.print_exc()
        ending = {"error": f"{type(error).__name__}: {error}"}
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(ending))
    sys.stderr.flush()
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter runs at its end
    atexit._run_exitfuncs()
    os._exit(1 if "error" in ending else 0)
