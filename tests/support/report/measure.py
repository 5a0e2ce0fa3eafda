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
from torch.nn.attention import SDPBackend, sdpa_kernel

from fullshard.sharding import fully_shard
from support.report.models import Model, models

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
    library_bytes = _library_bytes(device, card)
    found: dict[str, dict[str, Any]] = {}
    for name, model in models(small).items():
        found[name] = {}
        for engine in ENGINES:
            losses = _losses(model, engine, mesh, device)
            gc.collect()
            card.empty_cache()
            found[name][engine] = {"losses": losses, **_trained(model, engine, mesh, device, card)}
            gc.collect()
            card.empty_cache()
    trace = _traced(next(iter(models(small).values())), mesh, device, card, small)
    if rank == 0:
        measured = {"library_bytes": library_bytes, "models": found}
        Path(folder, "measured.json").write_text(json.dumps(measured))
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


def _library_bytes(device: torch.device, card: Any) -> int:
    """Return what libraries allocate at their first use and keep, such as cuBLAS's workspaces."""
    linear = nn.Linear(64, 64, device=device)
    linear(torch.ones(64, 64, device=device)).sum().backward()
    del linear
    card.synchronize()
    return int(card.memory_allocated())


def _losses(model: Model, engine: str, mesh: DeviceMesh, device: torch.device) -> list[float]:
    """Train some steps with kernels that add in the same order in every run.

    The fused attentions of CUDA do not in their backward: two runs of torch's own engine differ.
    """
    module = _sharded(model, engine, mesh, device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        for step in range(WARM + TIMED):
            loss = model.loss(module, _inputs(model, step, device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    torch.use_deterministic_algorithms(False)
    return [each.item() for each in losses]


def _trained(
    model: Model, engine: str, mesh: DeviceMesh, device: torch.device, card: Any
) -> dict[str, Any]:
    """Train some steps; return peak memory beside what libraries keep, in bytes, and seconds."""
    before = card.memory_allocated()
    module = _sharded(model, engine, mesh, device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    whole, host = [], []
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
        del loss
    groups = len(model.units(module)) + 1
    return {
        "peak_bytes": card.max_memory_allocated() - before,
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
