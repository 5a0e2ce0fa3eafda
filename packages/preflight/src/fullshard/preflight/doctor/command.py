"""``doctor`` from the command line, alone or under torchrun.

Alone, ``run_doctor`` starts ranks on this machine, so that collectives are checked as well.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from fullshard.preflight.commands.local_ranks import interrupts_as
from fullshard.preflight.doctor.together import diagnose

__all__ = ["run_doctor"]

_MOST_LOCAL = 4
_PATIENCE = timedelta(seconds=120)  # a rank that does not answer is a finding, not a long wait


def run_doctor(folder: Path | None, ranks: int | None, *, as_json: bool) -> int:
    """Diagnose, print the findings on rank 0, and return the exit code: 0, or 1 after a failure.

    Args:
        folder: a folder whose disk is measured; None: no disk.
        ranks: how many ranks to start here; None: one per device, or 2 to 4 by the number of cores.
            Under torchrun its ranks are used.
        as_json: print JSON in place of lines.
    """
    if dist.is_initialized():
        return _report(folder, as_json)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(timeout=_PATIENCE)
        try:
            return _report(folder, as_json)
        finally:
            dist.destroy_process_group()
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    count = ranks or devices or min(max(os.cpu_count() or 1, 2), _MOST_LOCAL)
    with tempfile.TemporaryDirectory(prefix="fullshard-doctor-") as scratch:
        _start_ranks((count, devices > 0, scratch, folder, as_json), count)
        return int(Path(scratch, "code").read_text())


def _start_ranks(given: tuple[object, ...], count: int) -> None:
    """Run ``_run_rank`` on ``count`` processes and wait for them; Ctrl-C ends them silently."""
    # A terminal sends Ctrl-C to the ranks, too. The ranks ignore the signal while they
    # import, so no rank prints a traceback; ``_run_rank`` lets the signal end the process.
    with interrupts_as(signal.SIG_IGN):
        ranks = multiprocessing.spawn(_run_rank, args=given, nprocs=count, join=False)
    try:
        while not ranks.join():
            pass
    except KeyboardInterrupt:
        for process in ranks.processes:
            process.kill()
            process.join()
        raise


def _run_rank(
    rank: int, count: int, on_devices: bool, scratch: str, folder: Path | None, as_json: bool
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if on_devices:
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    else:
        torch.set_num_threads(max((os.cpu_count() or 1) // count, 1))
    store = dist.FileStore(f"{scratch}/store", count)
    dist.init_process_group(store=store, rank=rank, world_size=count, timeout=_PATIENCE)
    code = _report(folder, as_json)
    if rank == 0:
        Path(scratch, "code").write_text(str(code))
    dist.barrier()
    dist.destroy_process_group()


def _report(folder: Path | None, as_json: bool) -> int:
    diagnosis = diagnose(folder)
    if dist.get_rank() == 0:
        sys.stdout.write(f"{diagnosis.as_json() if as_json else diagnosis}\n")
        sys.stdout.flush()
    return 0 if diagnosis.healthy else 1
