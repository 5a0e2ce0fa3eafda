"""What each rank measures: both engines on the same models, one after the other."""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.sharding import fully_shard
from support.report.models import Model, models

__all__ = ["measure"]

ENGINES: dict[str, Any] = {"fullshard": fully_shard, "torch": torch_fsdp.fully_shard}
WARM, TIMED = 2, 5


def measure(rank: int, world_size: int, folder: str, small: bool) -> None:
    """Measure on one rank; rank 0 writes ``measured.json`` and ``trace.json`` into the folder."""
    from support.card import CARD, TRANSPORT, card  # this loads the device

    device = torch.device(CARD.type, 0 if small else rank)
    card.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    dist.init_process_group(
        f"cpu:gloo,{CARD.type}:{TRANSPORT}",
        store=dist.FileStore(os.path.join(folder, "store"), world_size),
        rank=rank,
        world_size=world_size,
    )
    mesh = init_device_mesh(CARD.type, (world_size,))
    found: dict[str, dict[str, Any]] = {}
    for name, model in models(small).items():
        found[name] = {}
        for engine in ENGINES:
            found[name][engine] = _trained(model, engine, mesh, device, card)
            gc.collect()
            card.empty_cache()
    trace = _traced(next(iter(models(small).values())), mesh, device, card, small)
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(found))
        Path(folder, "trace.json").write_text(json.dumps(trace))
    dist.barrier()
    dist.destroy_process_group()


def _sharded(model: Model, engine: str, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    module = model.build().to(device)
    for unit in model.units(module):
        ENGINES[engine](unit, mesh=mesh)
    sharded: nn.Module = ENGINES[engine](module, mesh=mesh)
    return sharded


def _inputs(model: Model, step: int, device: torch.device) -> list[torch.Tensor]:
    seed = 1 + step * dist.get_world_size() + dist.get_rank()
    return [each.to(device) for each in model.batch(seed)]


def _trained(
    model: Model, engine: str, mesh: DeviceMesh, device: torch.device, card: Any
) -> dict[str, Any]:
    """Train some steps; return losses, peak memory in bytes, and times in seconds."""
    module = _sharded(model, engine, mesh, device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses, whole, host = [], [], []
    for step in range(WARM + TIMED):
        inputs = _inputs(model, step, device)
        card.synchronize()
        if step == WARM:
            card.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = model.loss(module, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        queued = time.perf_counter()
        card.synchronize()
        whole.append(time.perf_counter() - start)
        host.append(queued - start)
        losses.append(loss.detach())
    groups = len(model.units(module)) + 1
    return {
        "losses": [each.item() for each in losses],
        "peak_bytes": card.max_memory_allocated(),
        "reserved_bytes": card.max_memory_reserved(),
        "step_s": statistics.median(whole[WARM:]),
        "host_s_per_group": statistics.median(host[WARM:]) / groups,
    }


def _traced(model: Model, mesh: DeviceMesh, device: torch.device, card: Any, small: bool) -> Any:
    """Return one step of ours in the format of Chrome's trace viewer."""
    module = _sharded(model, "fullshard", mesh, device)

    def step(number: int) -> None:
        model.loss(module, _inputs(model, number, device)).backward()
        module.zero_grad()
        card.synchronize()

    step(0)
    if small:
        from support.device.building import extension

        extension().record_tasks(True)
        step(1)
        extension().record_tasks(False)
        return _events(extension().recorded_tasks())
    with torch.profiler.profile() as profile:
        step(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())


def _events(tasks: list[tuple[str, int, int, float, float]]) -> dict[str, Any]:
    return {
        "traceEvents": [
            {"name": name, "ph": "X", "pid": device, "tid": stream, "ts": start, "dur": end - start}
            for name, device, stream, start, end in tasks
        ]
    }
