"""An optimizer whose state is in files, and in memory only for one bucket of parameters at a time.

``OffloadedOptimizer`` wraps any optimizer that steps each parameter by itself. A step goes through
the parameters in buckets: while one bucket is stepped, the state of the next is read and that of
the last is written. ``staging`` owns the buffers and ``state_file`` the file.

[Note: state in a file] Between steps each large tensor of the optimizer's state is a view of the
mapped file, with the shape, dtype and placements that the optimizer gave it. So state dicts,
checkpoints and user code read and write the state as always. The views take no memory of the
process: the system drops pages that nobody touches. A step does not use the map. It reads the file
into buffers ahead of use. The state may also hold tensors with memory of their own, from the first
step, from a state dict or from a user. A step uses such a tensor directly, and then moves the
tensor to the file.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.comm.spi import can_pin, traits_of
from fullshard.optim.base.stepped import label_of
from fullshard.optim.owners.optimizer import MatrixOptimizer
from fullshard.optim.owners.ranks import group_of
from fullshard.optim.tiers.staging import Batch, Staging
from fullshard.optim.tiers.state_file import Extent, StateFile
from fullshard.sharding import rebind_optimizer
from fullshard.sharding.spi import (
    PLAIN,
    Comparison,
    ShardingSpec,
    device_of_mesh,
    local_shard,
    make_dtensor,
    require_bool,
    require_count,
    spec_of,
    untraced,
)

__all__ = ["FileTier", "OffloadStatistics", "OffloadedOptimizer", "StateOffloadError"]

_ROOM = 32  # the file may grow to this many times the parameters' bytes; it is sparse until then
_LEAST_ROOM = 256 << 20  # bytes
_HOOKS = "_optimizer_"  # how torch (2.11 to 2.15) names an optimizer's dicts of hooks
_ENGINE = "_fullshard_"  # how sharding names what it keeps for one optimizer

_WORDS = Comparison(
    what="optimizer state in files",
    error="optimizer state in files: ",
    mismatch="optimizer state in files: ",
    advice="",
)


class StateOffloadError(RuntimeError):
    """Optimizer state could not be read or written; raised on every rank of the model."""


@dataclass(frozen=True, kw_only=True)
class OffloadStatistics:
    """The traffic of one ``OffloadedOptimizer`` since it was made, on this rank.

    Attributes:
        bytes_read: bytes of state read from the file.
        bytes_written: bytes of state written to it.
        wait_seconds: seconds that steps waited for the disk.
        buffer_bytes: bytes of host memory that buffers take between steps.
        direct: whether the file system allows direct I/O, past the page cache.
    """

    bytes_read: int
    bytes_written: int
    wait_seconds: float
    buffer_bytes: int
    direct: bool


@dataclass(frozen=True)
class FileTier:
    """Where and how an ``OffloadedOptimizer`` keeps state in files.

    Args:
        folder: a folder on a local disk, best on NVMe. Each rank makes one file there, which has no
            name and is gone when the process ends. Ranks may share the folder.
        bucket_mb: MiB of this rank's parameters whose state is in memory at once. A larger
            parameter is a bucket by itself.
        buffers: buckets of state in memory: one that is stepped, others that are read or written.
        threads: how many reads and writes run at once.
        direct: use direct I/O where the file system has it: state does not fill the page cache.
        min_bytes: smaller tensors of state stay in memory, such as the numbers of steps.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if one is out of its range.
    """

    folder: str | Path
    bucket_mb: float = 16
    buffers: int = 3
    threads: int = 4
    direct: bool = True
    min_bytes: int = 4096

    def __post_init__(self) -> None:
        """Check the fields."""
        if not isinstance(self.folder, (str, Path)):
            raise TypeError(f"folder is a {type(self.folder).__name__}; pass a path")
        if Path(self.folder).exists() and not Path(self.folder).is_dir():
            raise ValueError(f"folder is {str(self.folder)!r}, which is a file; pass a folder")
        if isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, (int, float)):
            raise TypeError(f"bucket_mb is {self.bucket_mb!r}; pass a number of MiB")
        if not 0 < self.bucket_mb < float("inf"):
            raise ValueError(f"bucket_mb is {self.bucket_mb}; pass a positive number of MiB")
        for name in ("buffers", "threads", "min_bytes"):
            require_count(name, getattr(self, name))
        if self.buffers < 3:
            raise ValueError(
                f"buffers is {self.buffers}; pass 3 or more: one bucket is read, one stepped and "
                "one written at the same time"
            )
        require_bool("direct", self.direct)


@dataclass(frozen=True, eq=False)
class _Entry:
    """A tensor of state that is in the file.

    Attributes:
        extent: the place of the tensor in the file.
        tensor: the view of the mapped file that the optimizer's state holds.
        device: the device on which the optimizer steps the tensor.
    """

    extent: Extent
    tensor: torch.Tensor
    device: torch.device

    @property
    def spec(self) -> ShardingSpec | None:
        """The placements of the tensor; None: a plain tensor."""
        return spec_of(self.tensor) if isinstance(self.tensor, DTensor) else None

    def on_host(self, view: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the tensor in ``view``, the bytes of an extent."""
        return _laid_as(_local(self.tensor), view)


class _Staged:
    """One bucket's state on its way through a step: views of a buffer, or copies on a device."""

    def __init__(self, items: Sequence[_Item], batch: Batch) -> None:
        """Make the tensors; a copy to a device may be on its way on the current stream."""
        self.batch = batch
        self._of: dict[tuple[Any, Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for item, view in zip(items, batch.views, strict=True):
            entry = item.entry
            host = entry.on_host(view)
            local = host if entry.device.type == "cpu" else _copied(host, entry.device)
            value = local if entry.spec is None else make_dtensor(local, entry.spec)
            self._of[item.param, item.key] = value, local, host

    def value(self, param: Any, key: Any, otherwise: Any) -> Any:
        """Return the staged tensor of ``key``; ``otherwise`` if none is staged."""
        found = self._of.get((param, key))
        return otherwise if found is None else found[0]

    def keeps(self, param: Any, key: Any, value: Any) -> bool:
        """Return whether a step left the staged tensor in its place."""
        found = self._of.get((param, key))
        return found is not None and found[0] is value and _local(value) is found[1]

    def collect(self) -> None:
        """Copy state that was stepped on a device to the buffer, and wait for the copies."""
        devices = set()
        for _, local, host in self._of.values():
            if local is not host:
                host.copy_(local, non_blocking=True)
                devices.add(local.device)
        for device in devices:
            if traits_of(device).streams:
                torch.accelerator.current_stream(device).synchronize()
            else:
                torch.get_device_module(device).synchronize()


@dataclass(frozen=True, eq=False)
class _Item:
    """One tensor of the state of a parameter, and its place in the file.

    Attributes:
        param: the parameter.
        key: the name of the tensor in its state.
        state: the state of the parameter in the wrapped optimizer.
        entry: the place of the tensor.
    """

    param: Any
    key: Any
    state: dict[Any, Any]
    entry: _Entry


class OffloadedOptimizer(Optimizer):
    """An optimizer that keeps its state in files and brings it to memory bucket by bucket.

    The steps equal those of ``optimizer`` to the bit. Use it in the place of ``optimizer``:
    LR schedulers, ``zero_grad``, ``clip_grad_norm_``, ``GradScaler``, hooks, state dicts and
    checkpoints work as always. ``state`` and ``state_dict()`` hold views of the file, which the
    next step changes, as it changes the state of other optimizers.

    Attributes:
        optimizer: the optimizer that is stepped.
        tier: where state is kept.

    Args:
        optimizer: an optimizer that steps each parameter by itself, as all of ``torch.optim`` do
            but LBFGS. State that it has already moves to the file.
        tier: where to keep it.

    Raises:
        TypeError: if an argument is of the wrong type, or the optimizer steps parameters together.
        StateOffloadError: on every rank of the model, if a rank cannot make its file.
    """

    def __init__(self, optimizer: Optimizer, tier: FileTier) -> None:
        """Make the file, and move the state to it."""
        _require_separable(optimizer)
        if not isinstance(tier, FileTier):
            raise TypeError(f"tier is a {type(tier).__name__}; pass FileTier(folder)")
        # Not by torch's constructor: groups, state and hooks stay those of the wrapped optimizer.
        for name, value in vars(optimizer).items():
            if name.startswith(_HOOKS) or not _is_own(name):
                vars(self)[name] = value
        self.optimizer = optimizer
        self.tier = tier
        self._error = ""
        self._entries: dict[int, _Entry] = {}  # by the id of the tensor in the state
        self._staging: Staging | None = None
        params = [param for group in self.param_groups for param in group["params"]]
        room = _ROOM * sum(_local(param).nbytes for param in params) + _LEAST_ROOM
        try:
            file = StateFile(Path(tier.folder), room, threads=tier.threads, direct=tier.direct)
        except OSError as error:
            self._note(f"cannot make a file in {str(tier.folder)!r}: {error.strerror}", "")
        else:
            host = torch.device("cpu")
            pin = any(param.device != host for param in params) and can_pin(host)
            self._file = file
            self._staging = Staging(file, buffers=tier.buffers, pin=pin)
        self._agree()
        self._store_all()

    # -- as every optimizer -----------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override] # an attribute there
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override] # an attribute
        """The state of the wrapped optimizer, whose large tensors are views of the file."""
        if self._staging is not None:
            self._staging.drain()
        return self.optimizer.state

    @property
    def statistics(self) -> OffloadStatistics:
        """The traffic of this rank so far. Waits for the last writes."""
        staging = self._ready()
        staging.drain()
        return OffloadStatistics(
            bytes_read=self._file.bytes_read,
            bytes_written=self._file.bytes_written,
            wait_seconds=staging.waited_ns / 1e9,
            buffer_bytes=staging.nbytes,
            direct=self._file.direct,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer; its large tensors are in the file."""
        self._ready().drain()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()``, of the wrapped optimizer or of one like it, into the file."""
        self._ready().drain()
        self.optimizer.load_state_dict(state_dict)
        self._store_all()

    @Optimizer.profile_hook_step
    @torch.no_grad()
    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters, bucket by bucket; every rank of the model calls it.

        Args:
            closure: computes the loss and its gradients; called once, before the first bucket.

        Returns:
            The result of the closure, or None.

        Raises:
            StateOffloadError: on every rank, after the step, if a rank could not read or write
                state. State that could not be written stays in memory, and nothing is lost; a
                parameter whose state could not be read was not stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_buckets()
        self._agree()
        return loss

    # -- a step -----------------------------------------------------------------------------------

    def _step_buckets(self) -> None:
        rebind_optimizer(self.optimizer)
        staging, buckets = self._ready(), self._buckets()
        ahead = self.tier.buffers - 1
        reads = deque([self._read(bucket) for bucket in buckets[:ahead]])
        options: dict[int, dict[str, Any]] = {}  # by group, those of its last bucket
        attributes: dict[str, Any] = {}
        try:
            for index, bucket in enumerate(buckets):
                stepped = self._step_bucket(bucket, *reads.popleft())
                if index + ahead < len(buckets):
                    reads.append(self._read(buckets[index + ahead]))
                if stepped is not None:
                    options.update(zip(bucket, stepped.param_groups, strict=True))
                    attributes = vars(stepped)
        finally:
            for _, batch in reads:  # of a step that raised
                staging.drop(batch)
        for index, group in options.items():
            mine = self.param_groups[index]
            mine.update({**group, "params": mine["params"]})
        vars(self.optimizer).update(
            {name: value for name, value in attributes.items() if not _is_own(name)}
        )
        self._forget_unused()

    def _step_bucket(
        self, bucket: Mapping[int, Sequence[torch.Tensor]], items: Sequence[_Item], batch: Batch
    ) -> Optimizer | None:
        """Step one bucket, and begin to write its state.

        Returns:
            The optimizer of the bucket; None if the state could not be read.
        """
        staging, params = self._ready(), [param for each in bucket.values() for param in each]
        try:
            staging.wait(batch)
            staged = _Staged(items, batch)
            stepped = self._optimizer_of(bucket, staged)
            type(self.optimizer).step(stepped)
            staged.collect()
        except OSError as error:
            staging.drop(batch)
            names = ", ".join(dict.fromkeys(label_of(item.param) for item in items))
            what = f"the state of {names} could not be read, so they were not stepped"
            self._note(f"{what}: {error.strerror}", "load the last checkpoint")
            return None
        except BaseException:
            staging.drop(batch)
            raise
        self._store(self._take_over(params, stepped, staged), after=batch)
        return stepped

    def _optimizer_of(
        self, bucket: Mapping[int, Sequence[torch.Tensor]], staged: _Staged
    ) -> Optimizer:
        """Return an optimizer like the wrapped one, of one bucket and its staged state."""
        stepped: Optimizer = object.__new__(type(self.optimizer))
        for name, value in vars(self.optimizer).items():
            if name.startswith(_HOOKS):
                vars(stepped)[name] = OrderedDict()
            elif not _is_own(name):
                vars(stepped)[name] = value
        groups, state = self.param_groups, self.optimizer.state
        stepped.param_groups = [
            {**groups[index], "params": list(bucket[index])} for index in bucket
        ]
        stepped.state = defaultdict(dict)
        for param in (param for each in bucket.values() for param in each):
            if param in state:
                known = state[param].items()
                stepped.state[param] = {key: staged.value(param, key, v) for key, v in known}
        return stepped

    def _take_over(
        self, params: Sequence[torch.Tensor], stepped: Optimizer, staged: _Staged
    ) -> list[tuple[Any, Any]]:
        """Give the state after a step to the wrapped optimizer.

        Returns:
            The parameter and the key of each value that is not in the bucket's buffer.
        """
        state = self.optimizer.state
        found: list[tuple[Any, Any]] = []
        for param in params:
            values = stepped.state.get(param)
            if not values:
                state.pop(param, None)
                continue
            mine = state[param]
            for key in mine.keys() - values.keys():
                del mine[key]
            for key, value in values.items():
                if not staged.keeps(param, key, value):
                    mine[key] = value
                    found.append((param, key))
        stepped.state = defaultdict(dict)  # keeps no buffer
        return found

    def _buckets(self) -> list[dict[int, list[torch.Tensor]]]:
        """Return the parameters of each bucket, by group; equal on all ranks."""
        limit, nbytes = self.tier.bucket_mb * 2**20, 0.0
        buckets: list[dict[int, list[torch.Tensor]]] = []
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                size = _share_of(param)
                if not buckets or nbytes + size > limit:
                    buckets.append({})
                    nbytes = 0
                buckets[-1].setdefault(index, []).append(param)
                nbytes += size
        return buckets

    def _read(self, bucket: Mapping[int, Sequence[torch.Tensor]]) -> tuple[list[_Item], Batch]:
        """Begin to read the state of a bucket."""
        items = []
        for params in bucket.values():
            for param in params:
                state: dict[Any, Any] = self.optimizer.state.get(param) or {}
                for key, value in state.items():
                    entry = self._entry_of(value)
                    if entry is not None:
                        items.append(_Item(param, key, state, entry))
        extents = [item.entry.extent for item in items]
        return items, self._ready().read(extents, partial(self._rescue, items))

    # -- what is in the file ----------------------------------------------------------------------

    def _entry_of(self, value: Any) -> _Entry | None:
        """Return the place of a tensor of the state; None if the tensor has memory of its own."""
        entry = self._entries.get(id(value))
        if entry is None or entry.tensor is not value:
            return None
        local, start = _local(value), self._file.memory.data_ptr() + entry.extent.offset
        return entry if local.data_ptr() == start else None  # else a user gave it other memory

    def _store_all(self) -> None:
        """Move all state in memory to the file, bucket by bucket."""
        for bucket in self._buckets():
            params = [param for each in bucket.values() for param in each]
            states = [(param, self.optimizer.state.get(param)) for param in params]
            self._store(
                [(p, key) for p, state in states if isinstance(state, dict) for key in state]
            )
        self._forget_unused()

    def _store(self, found: Sequence[tuple[Any, Any]], *, after: Batch | None = None) -> None:
        """Move tensors of the state, by parameter and key, from memory to the file.

        ``after``: a batch to write before them.
        """
        staging, items, sources = self._ready(), [], []
        if after is not None:
            staging.write(after)
        for param, key in found:
            state = self.optimizer.state[param]
            value = state[key]
            if self._entry_of(value) is not None or not self._may_move(value):
                continue
            try:
                extent = self._file.reserve(_local(value).nbytes)
            except OSError as error:
                what = f"no space for {_local(value).nbytes} bytes of {key!r}: {error.strerror}"
                self._note(
                    what,
                    "the state stays in memory; save a checkpoint, then use a folder "
                    "with more space",
                )
                continue
            items.append(_Item(param, key, state, self._new_entry(extent, value)))
            sources.append(_local(value))
        if not items:
            return
        extents = [item.entry.extent for item in items]
        batch = staging.take(extents, partial(self._rescue, items))
        for item, view, source in zip(items, batch.views, sources, strict=True):
            item.entry.on_host(view).copy_(source)
            item.state[item.key] = item.entry.tensor
            self._entries[id(item.entry.tensor)] = item.entry
        staging.write(batch)

    def _new_entry(self, extent: Extent, value: torch.Tensor) -> _Entry:
        local = _local(value)
        with torch.inference_mode(False):
            memory = self._file.memory[extent.offset : extent.offset + extent.nbytes]
            tensor = _laid_as(local, memory)
            if isinstance(value, DTensor):
                tensor = make_dtensor(tensor, spec_of(value))
        return _Entry(extent, tensor, local.device)

    def _may_move(self, value: Any) -> bool:
        """Return whether a value of the state is a tensor that the file can hold."""
        if not isinstance(value, torch.Tensor):
            return False
        if type(value) not in PLAIN and not isinstance(value, DTensor):
            return False
        local = _local(value)
        return local.nbytes >= self.tier.min_bytes and _is_dense(local)

    def _rescue(self, items: Sequence[_Item], batch: Batch, error: OSError) -> None:
        """Keep a bucket's state in memory, after a write of it failed."""
        for item, view in zip(items, batch.views, strict=True):
            entry, local = item.entry, item.entry.on_host(view).clone().to(item.entry.device)
            if item.state.get(item.key) is entry.tensor:
                spec = entry.spec
                item.state[item.key] = local if spec is None else make_dtensor(local, spec)
        self._note(
            f"{sum(view.numel() for view in batch.views)} bytes could not be written: "
            f"{error.strerror}",
            "the state stays in memory; save a checkpoint, then use another folder",
        )

    def _forget_unused(self) -> None:
        """Free the space of tensors that are no longer in the state."""
        states = [each for each in self.optimizer.state.values() if isinstance(each, dict)]
        used = {id(value) for state in states for value in state.values()}
        for key in self._entries.keys() - used:
            self._file.give_back(self._entries.pop(key).extent)

    # -- errors -----------------------------------------------------------------------------------

    def _ready(self) -> Staging:
        if self._staging is None:
            raise RuntimeError("this OffloadedOptimizer could not make its file")
        return self._staging

    def _note(self, what: str, advice: str) -> None:
        """Keep the first error for ``_agree``."""
        self._error = self._error or (f"{what}; {advice}" if advice else what)

    def _agree(self) -> None:
        """Raise on every rank of the model if a rank noted an error."""
        verdict, self._error = self._error, ""
        for mesh in _meshes_of(self.param_groups):
            process_group = group_of(mesh)
            if process_group is not None:
                verdict = _told(verdict, process_group, mesh)
        if verdict:
            raise StateOffloadError(verdict)


def _told(error: str, process_group: dist.ProcessGroup, mesh: DeviceMesh) -> str:
    return _WORDS.verdict([], error, process_group, device_of_mesh(mesh)) or error


def _require_separable(optimizer: object) -> None:
    """Raise ``TypeError`` unless the optimizer steps each parameter by itself."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    if isinstance(optimizer, (torch.optim.LBFGS, MatrixOptimizer, OffloadedOptimizer)):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, which steps parameters together; state in "
            "files needs an optimizer that steps each parameter by itself, such as AdamW"
        )


def _is_own(name: str) -> bool:
    """Return whether an attribute belongs to a bucket's optimizer alone."""
    return name in ("state", "param_groups", "step") or name.startswith((_HOOKS, _ENGINE))


def _meshes_of(groups: Sequence[Mapping[str, Any]]) -> list[DeviceMesh]:
    params = [param for group in groups for param in group["params"]]
    return list(dict.fromkeys(each.device_mesh for each in params if isinstance(each, DTensor)))


def _share_of(param: torch.Tensor) -> float:
    """Return the bytes of a rank's share of ``param``: equal on all ranks, unlike its shard's."""
    nbytes = float(param.numel() * param.dtype.itemsize)
    if not isinstance(param, DTensor):
        return nbytes
    spec = spec_of(param)
    pairs = zip(spec.mesh.shape, spec.placements, strict=True)
    for size, placement in pairs:
        nbytes /= 1 if placement.is_replicate() else size
    return nbytes


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_shard(tensor) if isinstance(tensor, DTensor) else tensor


def _laid_as(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``tensor`` in ``memory``, which has at least as many bytes."""
    flat = memory[: tensor.nbytes].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def _copied(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
    return copy.copy_(host, non_blocking=True)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.layout is torch.strided
