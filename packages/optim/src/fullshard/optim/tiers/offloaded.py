"""An optimizer whose state is in a tier, and where it is stepped only for a bucket at a time.

``OffloadedOptimizer`` wraps any optimizer that steps each parameter by itself. A step goes through
the parameters in buckets: while one bucket is stepped, the state of the next is read and that of
the last is written. ``stored`` moves state to and from the tier: a file, or host memory.

[Note: state in a tier] Between steps each large tensor of the optimizer's state is a view of the
mapped file or of host memory, with the shape, dtype and placements that the optimizer gave it.
State dicts, checkpoints and user code read and write the state as always. Views of a file take no
memory of the process: the system drops unused pages. A step does not use the views: the state is
copied into buffers ahead of use. The state may also hold tensors with memory of their own, from the
first step, from a state dict or from a user. A step uses such a tensor directly, and then moves the
tensor to the tier.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.optim.base.stepped import label_of
from fullshard.optim.owners.optimizer import MatrixOptimizer
from fullshard.optim.owners.ranks import group_of
from fullshard.optim.tiers.staged import Item, Staged
from fullshard.optim.tiers.staging import Batch
from fullshard.optim.tiers.stored import StoredState
from fullshard.optim.tiers.tier import FileTier, HostTier, OffloadStatistics, StateOffloadError
from fullshard.sharding import rebind_optimizer
from fullshard.sharding.spi import Comparison, device_of_mesh, spec_of, untraced

__all__ = ["OffloadedOptimizer"]

_HOOKS = "_optimizer_"  # how torch (2.11 to 2.15) names an optimizer's dicts of hooks
_ENGINE = "_fullshard_"  # how sharding names what it keeps for one optimizer

_WORDS = Comparison(
    what="offloaded optimizer state",
    error="offloaded optimizer state: ",
    mismatch="offloaded optimizer state: ",
    advice="",
)


class OffloadedOptimizer(Optimizer):
    """An optimizer that keeps its state in files or host memory, but for the bucket it steps.

    The steps equal those of ``optimizer`` to the bit. Use it in the place of ``optimizer``:
    LR schedulers, ``zero_grad``, ``clip_grad_norm_``, ``GradScaler``, hooks, state dicts and
    checkpoints work as always. ``state`` and ``state_dict()`` hold views of the tier, which the
    next step changes, as it changes the state of other optimizers.

    Attributes:
        optimizer: the optimizer that is stepped.
        tier: where state is kept.

    Args:
        optimizer: an optimizer that steps each parameter by itself, as all of ``torch.optim`` do
            but LBFGS. State that it has already moves to the tier.
        tier: where to keep it: ``FileTier(folder)`` or ``HostTier()``.

    Raises:
        TypeError: if an argument is of the wrong type, or the optimizer steps parameters together.
        StateOffloadError: on every rank of the model, if a rank cannot make its file.
    """

    def __init__(self, optimizer: Optimizer, tier: FileTier | HostTier) -> None:
        """Open the tier, and move the state to it."""
        _require_separable(optimizer)
        if not isinstance(tier, (FileTier, HostTier)):
            raise TypeError(f"tier is a {type(tier).__name__}; pass FileTier(folder) or HostTier()")
        # Not by torch's constructor: groups, state and hooks stay those of the wrapped optimizer.
        for name, value in vars(optimizer).items():
            if name.startswith(_HOOKS) or not _is_own(name):
                vars(self)[name] = value
        self.optimizer = optimizer
        self.tier = tier
        self._stored: StoredState | None = None
        failure = ""
        try:
            self._stored = StoredState(optimizer, tier)
        except OSError as error:
            failure = f"cannot open {tier}: {error.strerror}"
        self._agree(failure)
        self._store_all()

    # -- as every optimizer -----------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override] # an attribute there
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override] # an attribute
        """The state of the wrapped optimizer, whose large tensors are views of the tier."""
        if self._stored is not None:
            self._stored.staging.drain()
        return self.optimizer.state

    @property
    def statistics(self) -> OffloadStatistics:
        """The traffic of this rank so far. Waits for the last writes."""
        space, staging = self._ready().space, self._ready().staging
        staging.drain()
        return OffloadStatistics(
            bytes_read=space.bytes_read,
            bytes_written=space.bytes_written,
            wait_seconds=staging.waited_ns / 1e9,
            buffer_bytes=staging.nbytes,
            direct=space.direct,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles: the state is in a file of this process.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "an OffloadedOptimizer cannot be copied or pickled, as its state is in a file of this "
            "process; save its state_dict(), and load that into another optimizer"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer; its large tensors are in the tier."""
        self._ready().staging.drain()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()``, of the wrapped optimizer or of one like it, into the tier."""
        self._ready().staging.drain()
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
        self._agree(self._ready().take_error())
        return loss

    # -- a step -----------------------------------------------------------------------------------

    def _step_buckets(self) -> None:
        rebind_optimizer(self.optimizer)
        stored, buckets = self._ready(), self._buckets()
        ahead = self.tier.buffers - 1
        reads = deque([stored.read(_params_of(bucket)) for bucket in buckets[:ahead]])
        options: dict[int, dict[str, Any]] = {}  # by group, those of its last bucket
        attributes: dict[str, Any] = {}
        try:
            for index, bucket in enumerate(buckets):
                stepped = self._step_bucket(bucket, *reads.popleft())
                if index + ahead < len(buckets):
                    reads.append(stored.read(_params_of(buckets[index + ahead])))
                if stepped is not None:
                    options.update(zip(bucket, stepped.param_groups, strict=True))
                    attributes = vars(stepped)
        finally:
            for _, batch in reads:  # of a step that raised
                stored.staging.drop(batch)
            stored.staging.end_step()
        for index, group in options.items():
            mine = self.param_groups[index]
            mine.update({**group, "params": mine["params"]})
        vars(self.optimizer).update(
            {name: value for name, value in attributes.items() if not _is_own(name)}
        )
        stored.forget_unused()

    def _step_bucket(
        self, bucket: Mapping[int, Sequence[torch.Tensor]], items: Sequence[Item], batch: Batch
    ) -> Optimizer | None:
        """Step one bucket, and begin to write its state.

        Returns:
            The optimizer of the bucket; None if the state could not be read.
        """
        stored, staging = self._ready(), self._ready().staging
        try:
            staging.wait(batch)
        except OSError as error:
            staging.drop(batch)
            names = ", ".join(dict.fromkeys(label_of(item.param) for item in items))
            what = f"the state of {names} could not be read, so they were not stepped"
            stored.note(f"{what}: {error.strerror}", "load the last checkpoint")
            return None
        try:
            staged = Staged(items, batch)
            stepped = self._optimizer_of(bucket, staged)
            type(self.optimizer).step(stepped)
            staged.collect()
        except BaseException:
            staging.drop(batch)
            raise
        stored.store(self._take_over(_params_of(bucket), stepped, staged), after=batch)
        return stepped

    def _optimizer_of(
        self, bucket: Mapping[int, Sequence[torch.Tensor]], staged: Staged
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
        for param in _params_of(bucket):
            if param in state:
                known = state[param].items()
                stepped.state[param] = {key: staged.value(param, key, v) for key, v in known}
        return stepped

    def _take_over(
        self, params: Sequence[torch.Tensor], stepped: Optimizer, staged: Staged
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

    def _store_all(self) -> None:
        """Move all state in memory to the tier, bucket by bucket."""
        for bucket in self._buckets():
            self._ready().store_all(_params_of(bucket))
        self._ready().staging.end_step()
        self._ready().forget_unused()

    # -- errors -----------------------------------------------------------------------------------

    def _ready(self) -> StoredState:
        if self._stored is None:
            raise RuntimeError("this OffloadedOptimizer could not open its tier")
        return self._stored

    def _agree(self, error: str) -> None:
        """Raise on every rank of the model if a rank has an error."""
        for mesh in _meshes_of(self.param_groups):
            process_group = group_of(mesh)
            if process_group is not None:
                error = _told(error, process_group, mesh)
        if error:
            raise StateOffloadError(error)


def _params_of(bucket: Mapping[int, Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [param for params in bucket.values() for param in params]


def _told(error: str, process_group: dist.ProcessGroup, mesh: DeviceMesh) -> str:
    return _WORDS.verdict([], error, process_group, device_of_mesh(mesh)) or error


def _require_separable(optimizer: object) -> None:
    """Raise ``TypeError`` unless the optimizer steps each parameter by itself."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    if isinstance(optimizer, (torch.optim.LBFGS, MatrixOptimizer, OffloadedOptimizer)):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, which steps parameters together; state in "
            "a tier needs an optimizer that steps each parameter by itself, such as AdamW"
        )


def _is_own(name: str) -> bool:
    """Return whether an attribute belongs to a bucket's optimizer alone."""
    return name in ("state", "param_groups", "step") or name.startswith((_HOOKS, _ENGINE))


def _meshes_of(groups: Sequence[Mapping[str, Any]]) -> list[DeviceMesh]:
    params = [param for group in groups for param in group["params"]]
    return list(dict.fromkeys(each.device_mesh for each in params if isinstance(each, DTensor)))


def _share_of(param: torch.Tensor) -> float:
    """Return the bytes of ``param`` divided by the ranks that shard it, equal on all ranks."""
    nbytes = float(param.numel() * param.dtype.itemsize)
    if not isinstance(param, DTensor):
        return nbytes
    spec = spec_of(param)
    pairs = zip(spec.mesh.shape, spec.placements, strict=True)
    for size, placement in pairs:
        nbytes /= 1 if placement.is_replicate() else size
    return nbytes
