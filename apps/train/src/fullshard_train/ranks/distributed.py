"""The ranks of a run: who they are, what device each uses, and how they agree on an error.

Owns process-group start-up and the mesh. A `TrainError` is raised on every rank or on no rank, so
that no rank waits in a collective for a rank that has stopped. Refuses to know about models or
data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.comm import waiting
from fullshard_train.errors import TrainError
from fullshard_train.settings.config import Config

__all__ = [
    "Share",
    "World",
    "broadcast_bytes",
    "choose_device",
    "highest_over_ranks",
    "init_mesh",
    "make_mesh",
    "meet",
    "on_main",
    "over_ranks",
    "raise_together",
    "require_rows",
    "start_world",
    "stop_world",
    "sum_over_ranks",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The processes of a run, as one process sees the run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    patience: timedelta | None = None
    """How long a collective waits for the other ranks; None for torch's own limits."""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    @property
    def share(self) -> Share:
        """This rank's part of every batch."""
        return Share(index=self.rank, count=self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part of a batch, out of `count` parts; together they are the batch, whatever `count` is.

    Parts differ by one row at most: by none where the rows are a multiple of `count`.
    """

    index: int
    count: int

    def rows(self, batch: int, *, micro: int = 0, accumulate: int = 1) -> range:
        """The rows of a global batch that this share computes in one of `accumulate` micro-batches.

        `batch` must be a multiple of `accumulate`, and each micro-batch have `count` rows or more.
        """
        each = batch // accumulate
        first = micro * each
        return range(
            first + each * self.index // self.count, first + each * (self.index + 1) // self.count
        )


def start_world(patience: timedelta | None = None) -> World:
    """The world of torchrun's environment, or of one process without it, with a process group.

    The process group can always carry CPU tensors (gloo), and CUDA tensors (nccl) where there is
    CUDA, so that errors, corpora and checkpoints travel without a device.

    Args:
        patience: how long a collective waits for the other ranks before it raises.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" not in os.environ:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        return World(rank=0, size=1, local_rank=0, local_size=1)
    dist.init_process_group(backend, timeout=patience)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        patience=patience,
    )


def stop_world() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def meet() -> None:
    """Wait until every rank is here.

    A sum on the CPU, since a barrier may pick a GPU before each rank has chosen its own.
    """
    dist.all_reduce(torch.zeros(1))


def on_main(function: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Return the result of `function` on rank 0, on every rank; the result must be picklable.

    `group` has all ranks, and may be in use in another thread than the default one.

    Raises:
        TrainError: on every rank, if `function` raised one on rank 0.
    """
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except TrainError as error:
            box[1] = str(error)
    with waiting():
        dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise TrainError(box[1])
    result: T = box[0]
    return result


def raise_together(function: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Return the result of `function` on this rank; `group` as in `on_main`.

    Raises:
        TrainError: on every rank, if `function` raised one on any; the message is the lowest such
            rank's.
    """
    message: str | None = None
    try:
        result = function()
    except TrainError as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size()
    with waiting():
        dist.all_gather_object(messages, message, group=group)
    for text in messages:
        if text is not None:
            raise TrainError(text)
    return result


def broadcast_bytes(data: bytes | None) -> torch.Tensor:
    """Rank 0's `data` on every rank, uint8 `[len(data)]` on the CPU; other ranks pass None."""
    length = on_main(lambda: len(data or b""))
    if data is None:
        received = torch.empty(length, dtype=torch.uint8)
    else:
        received = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[:length]
    if length and dist.get_world_size() > 1:
        dist.broadcast(received, src=0)
    return received


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The sum of `values` over all ranks, in place and returned."""
    with waiting():
        dist.all_reduce(values)
    return values


def highest_over_ranks(*values: int) -> list[int]:
    """The highest of each value over all ranks; it travels between CPUs and waits for no device."""
    table = torch.tensor(values)
    with waiting():
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return [int(value) for value in table]


def over_ranks(value: int) -> list[int]:
    """The value of each rank, in their order; it travels between CPUs and waits for no device."""
    table = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    table[dist.get_rank()] = value
    with waiting():
        dist.all_reduce(table)
    return [int(each) for each in table]


def choose_device(config: Config, world: World) -> torch.device:
    """The device this rank computes on: its own GPU, or the CPU.

    Raises:
        TrainError: cuda was asked for and is not there, or there are more local ranks than GPUs.
    """
    wanted = config.parallel.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainError(
            "config parallel.device = 'cuda': this torch sees no GPU; use --device cpu"
        )
    if world.local_size > torch.cuda.device_count():
        raise TrainError(
            f"{world.local_size} ranks and {torch.cuda.device_count()} GPU(s) on this host: each"
            " rank needs its own; start fewer ranks or use --device cpu"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def make_mesh(config: Config, world: World, device: torch.device) -> DeviceMesh:
    """The mesh the model is sharded over: all ranks, or some of them, and replicated on others.

    Raises:
        TrainError: `parallel.mesh` is not the world, a micro-batch has less rows than ranks, or
            hosts that each are to hold the model have different numbers of ranks.
    """
    sizes = config.parallel.sizes(world.size)
    if math.prod(sizes) != world.size:
        raise TrainError(
            f"config parallel.mesh = {config.parallel.mesh}: the mesh covers all ranks, and there"
            f" are {world.size}; use --mesh {world.size}, or start {math.prod(sizes)} ranks"
        )
    require_rows(config, world.size)
    if config.run.task == "hf" and config.hf.shard_over == "host":
        if sizes[0] > 1:
            raise TrainError(
                f"config parallel.mesh = {config.parallel.mesh}: hf.shard_over = 'host' chooses the"
                " mesh; use --mesh 0, or hf.shard_over=world"
            )
        most, negative = highest_over_ranks(world.local_size, -world.local_size)
        if most != -negative:
            raise TrainError(
                "config hf.shard_over = 'host': hosts have from"
                f" {-negative} to {most} ranks; start as many on each, or take 'world'"
            )
        sizes = (world.size // most, most)
        return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
    if sizes[0] == 1:
        return init_mesh(world, device)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))


def require_rows(config: Config, ranks: int) -> None:
    """Pass if each rank has a row of each micro-batch.

    Raises:
        TrainError: the batch is too small.
    """
    parts = ranks * config.train.accumulate
    if config.train.batch < parts:
        raise TrainError(
            f"config train.batch = {config.train.batch}: must be at least ranks *"
            f" train.accumulate = {ranks} * {config.train.accumulate} = {parts}, a row each"
        )


def init_mesh(world: World, device: torch.device) -> DeviceMesh:
    """All ranks in one dimension, each on a device of `device`'s kind."""
    return init_device_mesh(device.type, (world.size,), mesh_dim_names=("shard",))
