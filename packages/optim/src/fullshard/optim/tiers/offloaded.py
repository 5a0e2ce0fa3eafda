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

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.optim.base.stepped import label_of
from fullshard.optim.base.wrapping import (
    Bucket,
    WrappingOptimizer,
    error_of_any_rank,
    forget_step,
    params_of,
    part_of,
    take_over,
)
from fullshard.optim.owners.optimizer import MatrixOptimizer
from fullshard.optim.tiers.staged import Item, Staged
from fullshard.optim.tiers.staging import Batch
from fullshard.optim.tiers.stored import StoredState
from fullshard.optim.tiers.tier import FileTier, HostTier, OffloadStatistics, StateOffloadError
from fullshard.sharding import rebind_optimizer
from fullshard.sharding.spi import Comparison, spec_of, untraced

__all__ = ["OffloadedOptimizer"]

_WORDS = Comparison(
    what="offloaded optimizer state",
    error="offloaded optimizer state: ",
    mismatch="offloaded optimizer state: ",
    advice="",
)


class OffloadedOptimizer(WrappingOptimizer):
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

    _no_copy = "its state is in the memory or a file of this process"

    def __init__(self, optimizer: Optimizer, tier: FileTier | HostTier) -> None:
        """Open the tier, and move the state to it."""
        _require_separable(optimizer)
        if not isinstance(tier, (FileTier, HostTier)):
            raise TypeError(f"tier is a {type(tier).__name__}; pass FileTier(folder) or HostTier()")
        super().__init__(optimizer)
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
        reads = deque([stored.read(params_of(bucket)) for bucket in buckets[:ahead]])
        stepped: list[tuple[dict[int, list[torch.Tensor]], Optimizer]] = []
        try:
            for index, bucket in enumerate(buckets):
                part = self._step_bucket(bucket, *reads.popleft())
                if index + ahead < len(buckets):
                    reads.append(stored.read(params_of(buckets[index + ahead])))
                if part is not None:
                    stepped.append((bucket, part))
        finally:
            for _, batch in reads:  # of a step that raised
                stored.staging.drop(batch)
            stored.staging.end_step()
        for bucket, part in stepped:
            take_over(self.optimizer, bucket, part)
        stored.forget_unused()

    def _step_bucket(self, bucket: Bucket, items: Sequence[Item], batch: Batch) -> Optimizer | None:
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
        stored.store(self._take_over(params_of(bucket), stepped, staged), after=batch)
        return stepped

    def _optimizer_of(self, bucket: Bucket, staged: Staged) -> Optimizer:
        """Return an optimizer like the wrapped one, of one bucket and its staged state."""
        part, state = part_of(self.optimizer, bucket), self.optimizer.state
        for param in params_of(bucket):
            if param in state:
                known = state[param].items()
                part.state[param] = {key: staged.value(param, key, v) for key, v in known}
        return part

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
        forget_step(stepped)
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
            self._ready().store_all(params_of(bucket))
        self._ready().staging.end_step()
        self._ready().forget_unused()

    # -- errors -----------------------------------------------------------------------------------

    def _ready(self) -> StoredState:
        if self._stored is None:
            raise RuntimeError("this OffloadedOptimizer could not open its tier")
        return self._stored

    def _agree(self, error: str) -> None:
        """Raise on every rank of the model if a rank has an error."""
        error = error_of_any_rank(error, self.param_groups, _WORDS)
        if error:
            raise StateOffloadError(error)


def _require_separable(optimizer: object) -> None:
    """Raise ``TypeError`` unless the optimizer steps each parameter by itself."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    if isinstance(optimizer, WrappingOptimizer):
        raise TypeError(
            f"optimizer is an {type(optimizer).__name__}, which wraps another; pass that one, its "
            "attribute optimizer"
        )
    if isinstance(optimizer, (torch.optim.LBFGS, MatrixOptimizer)):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, which steps parameters together; state in "
            "a tier needs an optimizer that steps each parameter by itself, such as AdamW"
        )


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
