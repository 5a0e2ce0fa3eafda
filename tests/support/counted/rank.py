"""One rank that trains kinds of model, and counts the memory of its steps."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.samehost import set_shared_memory
from support.counted.kinds import KINDS, Kind, adamw

_STEPS = 5


def _peaks(kind: Kind) -> list[int]:
    """The most bytes of each step but the first, which makes the optimizer's state."""
    library = ctypes.CDLL(None)
    gc.collect()
    before, peaks = library.counted_now(), []
    model = kind.build()
    kind.shard(model)
    optimizer = adamw(model.parameters())
    for _ in range(_STEPS):
        gc.collect()
        dist.barrier()
        library.counted_restart()
        batch = kind.batch()
        for _ in range(kind.micro_batches):
            kind.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        del batch
        peaks.append(library.counted_peak() - before)
    return peaks[1:]


def main(rank: str, ranks: str, folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    for name in ("counted_now", "counted_peak"):
        getattr(ctypes.CDLL(None), name).restype = ctypes.c_long
    store = dist.FileStore(f"{folder}/store", int(ranks))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks))
    set_shared_memory(False)
    _peaks(KINDS[names[0]])  # imports what a step imports
    found = {name: _peaks(KINDS[name]) for name in names}
    if rank == "0":
        (Path(folder) / "peaks.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
