"""The client of the engine, with the four methods of vLLM's ``VLLMWeightSyncClient``; trainers.

``send_full`` and ``finish_slices`` do what a trainer engine of vLLM does in ``send_weights``: on
every rank, with the client used on rank 0 alone, and workers receiving while ranks send.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from typing import Any, Self

import torch
import torch.distributed as dist

from fullshard.checkpoint import ModelSource, SliceSender, SliceTransfer, connect_engine


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class LoopbackClient:
    """Passes each request on to all workers, and raises what a worker raised."""

    def __init__(self, address: str, workers: int, *, start: bool) -> None:
        """Listen; a ``with`` block begins once all workers have connected.

        Args:
            address: of a socket in the file system, on which workers connect.
            workers: how many there are.
            start: whether this starts them, as processes; else they start by themselves.
        """
        self._listener = Listener(address)
        self._count = workers
        self._workers: dict[int, Any] = {}
        command = [sys.executable, "-m", "support.engine.workers", address]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        numbers = range(workers) if start else ()
        self.processes = [
            subprocess.Popen([*command, str(number)], env=environment) for number in numbers
        ]

    def __enter__(self) -> Self:
        come = [self._listener.accept() for _ in range(self._count)]
        self._workers = dict(sorted((each.recv(), each) for each in come))
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self._workers.values():
            connection.close()
        self._listener.close()
        for process in self.processes:
            process.wait(60)

    def _all(self, request: str, payload: Any = None) -> None:
        for connection in self._workers.values():
            connection.send((request, payload))
        errors = [connection.recv() for connection in self._workers.values()]
        if any(errors):
            raise RuntimeError("; ".join(filter(None, errors)))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let workers meet the trainer ranks."""
        self._all("init", init_info)

    def start_weight_update(self) -> None:
        self._all("start")

    def update_weights(self, update_info: Any) -> None:
        self._all("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let workers use what they received."""
        self._all("finish", weight_version)

    def state(self, worker: int) -> tuple[dict[str, torch.Tensor], str | None, int]:
        """What a worker has: weights, their version, and the bytes that came for them."""
        self._workers[worker].send(("state", None))
        found: tuple[dict[str, torch.Tensor], str | None, int]
        found = pickle.loads(self._workers[worker].recv())
        return found


def connected(
    client: LoopbackClient | None,
    group: dist.ProcessGroup,
    workers: int,
    slices: SliceSender | None,
) -> dist.ProcessGroup | None:
    """The link of trainer ranks and workers; of rank 0 and workers where whole tensors travel.

    Args:
        client: on rank 0.
        group: of the trainer ranks.
        workers: how many there are.
        slices: what sends slices; None: whole tensors are broadcast.
    """
    ports: list[Any] = [free_port() if client is not None else None]
    dist.broadcast_object_list(ports, group=group, group_src=0)
    trainers = group.size() if slices is not None else 1
    info: dict[str, Any] = {"port": ports[0], "trainers": trainers, "size": trainers + workers}
    if slices is not None:
        info["slices"] = slices.init_info()
    if group.rank() >= trainers:
        return None
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client.init_weight_transfer_engine, info) if client else None
        link = connect_engine(
            "127.0.0.1", ports[0], rank=group.rank(), size=trainers + workers, timeout=60
        )
        if asked is not None:
            asked.result()
    return link


def send_full(
    client: LoopbackClient | None, source: ModelSource, link: dist.ProcessGroup | None
) -> None:
    """Broadcast whole tensors from rank 0, in the four phases; call it on every rank."""
    if client is None or link is None:
        for _ in source.iter_full():
            pass
        return
    metas = source.metadata
    update = {
        "names": [meta.name for meta in metas],
        "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
    }
    client.start_weight_update()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client.update_weights, update)
        for meta, (name, tensor) in zip(metas, source.iter_full(), strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == (meta.name, meta.dtype, meta.shape)
            options = dist.BroadcastOptions()
            options.rootRank = 0
            link.broadcast([tensor.contiguous()], options).wait()
        asked.result()
    client.finish_weight_update("full")


def finish_slices(
    client: LoopbackClient | None, transfer: SliceTransfer, **update_info: Any
) -> None:
    """Take the slices of a transfer to the workers, in the last three phases."""
    if client is None:
        transfer.wait()
        return
    client.start_weight_update()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(client.update_weights, update_info)
        transfer.wait()
        asked.result()
    client.finish_weight_update("slices")
