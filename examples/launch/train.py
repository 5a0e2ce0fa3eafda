"""Train a small model on shards, save during training, and continue from the newest checkpoint.

torchrun, SLURM, Kubernetes and Ray Train start this file without a change; a page of the
documentation is about each. On one host::

    OUT=runs/launch torchrun --standalone --nproc-per-node=2 train.py

The environment has the settings: OUT is a folder that every host sees, STEPS the length of the run.
After SIGTERM all ranks finish the step, save and leave.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fullshard.checkpoint import async_save
from fullshard.optim import clip_grad_norm_
from fullshard.sharding import fully_shard

WIDTH, ROWS = 64, 64  # ROWS of a step, over all ranks
SAVE_EVERY = 10
STOP = threading.Event()  # set by a signal, on any rank

# What to do with a step, its loss and its folder, once the checkpoint is complete; on every rank.
Saved = Callable[[int, float, Path], None]


def build(device: torch.device) -> nn.Module:
    """Return the model on shards: a group for each block."""
    torch.manual_seed(0)  # equal values on every rank
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 4)).to(device)
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def batch(step: int) -> Tensor:
    """Return this rank's rows of a step; a step has the same rows on any number of ranks."""
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=drawn)[dist.get_rank() :: dist.get_world_size()]


def newest(out: Path) -> Path | None:
    """Return the newest complete checkpoint, which has ``.metadata``; all ranks, that of rank 0."""
    found = sorted(path.parent for path in out.glob("step-*/.metadata"))
    chosen = [found[-1] if found else None]
    dist.broadcast_object_list(chosen)
    return chosen[0]


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path | None) -> int:
    """Load a checkpoint of any number of ranks; return its step, or 0 without one."""
    if folder is None:
        return 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **parts)
    return state["step"]


def train(out: Path, steps: int, saved: Saved) -> None:
    """Train up to ``steps``, in a process group that exists, on the current device."""
    device = torch.device("cpu")
    if dist.get_backend() != "gloo":
        device = torch.accelerator.current_accelerator()
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, pending = load(model, optimizer, newest(out)) + 1, None
    for step in range(first, steps + 1):
        rows = batch(step).to(device)
        loss = nn.functional.cross_entropy(model(rows), rows[:, :4].argmax(dim=1))
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean, stop = everywhere(loss.detach())
        if dist.get_rank() == 0:
            with (out / "losses.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": mean}) + "\n")
        if step % SAVE_EVERY == 0 or step == steps or stop:
            finish(pending, saved)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step}
            pending = step, mean, async_save(state, out / f"step-{step:06}")
        if stop:
            STOP.set()  # also on ranks that received no signal
            break
    finish(pending, saved)


def everywhere(loss: Tensor) -> tuple[float, bool]:
    """Return the mean loss of all ranks, and whether any rank has received a signal."""
    both = torch.stack([loss, torch.full_like(loss, STOP.is_set())])
    dist.all_reduce(both)
    return both[0].item() / dist.get_world_size(), both[1].item() > 0


def finish(pending: tuple | None, saved: Saved) -> None:
    """Wait until a checkpoint is complete, and pass it on."""
    if pending is not None:
        step, mean, save = pending
        saved(step, mean, save.result())


def keep_two(step: int, loss: float, folder: Path) -> None:
    """Print the loss, and remove all but the two newest checkpoints; on rank 0."""
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss:.4f}, saved in {folder}", flush=True)
        for old in sorted(folder.parent.glob("step-*"))[:-2]:
            shutil.rmtree(old)


def main() -> None:
    """Run on each process that torchrun starts."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    signal.signal(signal.SIGTERM, lambda *_: STOP.set())
    out = Path(os.environ.get("OUT", "runs/launch"))
    out.mkdir(parents=True, exist_ok=True)
    train(out, int(os.environ.get("STEPS", "100")), keep_two)
    dist.destroy_process_group()
    if STOP.is_set():
        sys.exit(143)  # not 0: the run is not complete


if __name__ == "__main__":
    main()
