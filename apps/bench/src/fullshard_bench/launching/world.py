"""The world of one measurement: the process group, the device, the threads.

Owns how a rank starts: from `fullshard_bench.launching.launch`, from torchrun, or alone, as one
rank of a wide world whose other ranks do not exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard_bench.compat import lonely_store
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.job import Job
from fullshard_bench.launching.silent import register_silent_backend
from fullshard_bench.meshes import parse_mesh

__all__ = [
    "choose_device",
    "inside_torchrun",
    "local_world",
    "threads_of",
    "torchrun_world",
]

_TIMEOUT = timedelta(minutes=5)


def inside_torchrun() -> bool:
    """Return whether torchrun started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def local_world(job: Job, folder: Path, rank: int) -> Iterator[torch.device]:
    """Join the ranks of the job's mesh through a file in `folder`; yield this rank's device."""
    ranks = parse_mesh(job.mesh).ranks
    before = torch.get_num_threads()
    _prepare_host(threads_of(job))
    device = choose_device(job.settings.device, rank)
    if job.kind == "wide":
        register_silent_backend()
        backend = job.settings.wide_group
        dist.init_process_group(backend, store=lonely_store(), rank=0, world_size=ranks)
    else:
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group(
            _backend(device), store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT
        )
    try:
        yield device
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)


@contextmanager
def torchrun_world(device_type: str) -> Iterator[torch.device]:
    """The world that torchrun made; gives this rank's device."""
    device = choose_device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
    _prepare_host(torch.get_num_threads())
    dist.init_process_group(_backend(device), timeout=_TIMEOUT)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def choose_device(kind: str, local_rank: int) -> torch.device:
    """This rank's device.

    Raises:
        BenchError: cuda was asked for and there is none for this rank.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BenchError("--device cuda: this torch sees no GPU; use --device cpu")
    if local_rank >= torch.cuda.device_count():
        raise BenchError(
            f"--device cuda: each rank needs a GPU of its own, and this host has"
            f" {torch.cuda.device_count()}; use smaller meshes or --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def threads_of(job: Job) -> int:
    """Threads of one rank's operations: its share of the cores, unless the settings say.

    One rank of a wide world gets one thread: its host is what is looked at.
    """
    if job.settings.threads or job.kind == "wide":
        return job.settings.threads or 1
    affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
    return max(1, cores // parse_mesh(job.mesh).ranks)


def _prepare_host(threads: int) -> None:
    """Give this rank its threads, and let tiny numbers be zero.

    Gathers of a twin return old memory, which may contain denormal numbers; a step must not be
    slower because of them.
    """
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
