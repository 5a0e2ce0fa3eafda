"""Exponential moving averages of a sharded model's parameters, on its shards.

Owns the averages: their update after each step, their turn in the model's place, and their state
dict. It sends nothing: an average of shards is a shard of the average. The caller decides the
purpose of an average and its decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.spi import foreach_copy, foreach_lerp
from fullshard.sharding import FSDPParamGroup
from fullshard.sharding.spi import (
    group_of,
    in_block,
    local_of,
    make_dtensor,
    make_spec,
    owner_of,
    require_between_steps,
    require_bool,
    sharded_of,
    spec_of,
    untraced,
)

__all__ = ["ExponentialMovingAverage"]

_AVERAGES, _UPDATES = "averages", "updates"  # keys of the state dict


class ExponentialMovingAverage:
    """Averages of a model's trainable parameters, which may take their place in it.

    Works on sharded models, each rank on its shards, and on plain ones. Parameters that require no
    gradient are left out: they do not change. Buffers are left out, too, so that with the averages
    the model uses its present ones; or are averaged, on each rank its own.

    Attributes:
        updates: how often ``update()`` was called.
        in_use: whether the model has the averages now.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        use_buffers: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Start with the present values, which the first update replaces, as torch's does.

        Args:
            model: the model, after ``fully_shard``, with values; any that holds sharded modules.
            decay: how much of an average stays in an update, from 0 to 1; or a function that
                returns this number for a number of updates:
                ``lambda n: min(0.999, (1 + n) / (10 + n))`` follows a young model faster.
            use_buffers: average floating-point buffers, too.
            dtype: of the averages; None: that of the parameters. Averages of bfloat16 parameters
                want float32: what an update adds is less than bfloat16 can tell.
            device: where the averages live, ``"cpu"`` to save the accelerator's memory; None: where
                the shards do.

        Raises:
            TypeError: if an argument is of the wrong type.
            ValueError: if ``decay`` is not from 0 to 1.
            RuntimeError: inside a forward, a backward or an ``unsharded`` block of the model.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}; pass an nn.Module")
        require_bool("use_buffers", use_buffers)
        if not callable(decay):
            _require_decay(decay)
        self.updates = 0
        self.in_use = False
        self._model = model
        self._decay = decay
        self._use_buffers = use_buffers
        self._replaced: list[torch.Tensor] = []
        self._require_quiet("ExponentialMovingAverage()")
        self._averages: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            self._averages = {
                name: _placed(
                    local_of(source).to(device or source.device, dtype, copy=True), source
                )
                for name, source in self._averaged().items()
            }

    # -- averaging --------------------------------------------------------------------------------

    @torch.no_grad()
    @untraced
    def update(self) -> None:
        """Move the averages towards the present parameters; call it after ``optimizer.step()``.

        Nothing is sent.

        Raises:
            RuntimeError: while the model has the averages; inside a forward, a backward or an
                ``unsharded`` block of it; or if its parameters are not those that are averaged.
        """
        if self.in_use:
            raise RuntimeError(
                "update() was called while the model has the averages; call swap_out() first"
            )
        self._require_quiet("update()")
        present, averages = self._present(), self._local_averages()
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        _require_decay(decay)
        if self.updates and decay and averages:
            pairs = zip(present, averages, strict=True)
            foreach_lerp(averages, [p.to(a.device, a.dtype) for p, a in pairs], 1 - decay)
        else:
            foreach_copy(averages, present)
        self.updates += 1

    # -- in the model -----------------------------------------------------------------------------

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the averages inside a ``with`` block, and its own values after it."""
        self.swap_in()
        try:
            yield
        finally:
            self.swap_out()

    @untraced
    def swap_in(self) -> None:
        """Give the model the averages, until ``swap_out()``; every rank calls it.

        The model's own values are kept in a copy. Do not step an optimizer until then: what it
        changes is lost.

        Raises:
            RuntimeError: as ``update()`` does.
        """
        if self.in_use:
            raise RuntimeError("swap_in() was called twice; call swap_out() before")
        present, averages = self._present(), self._local_averages()
        with self._changing("swap_in()"):
            pairs = zip(present, averages, strict=True)
            self._replaced = [local.to(average.device, copy=True) for local, average in pairs]
            foreach_copy(present, averages)
            self.in_use = True

    @untraced
    def swap_out(self) -> None:
        """Give the model its own values back; every rank calls it.

        Raises:
            RuntimeError: if it has them, or as ``update()`` does.
        """
        if not self.in_use:
            raise RuntimeError("swap_out() was called, but the model has its own values")
        present = self._present()
        with self._changing("swap_out()"):
            foreach_copy(present, self._replaced)
            self._replaced = []
            self.in_use = False

    @contextmanager
    def _changing(self, call: str) -> Iterator[None]:
        """Reshard the model for writes to its shards in the block; every copy is stale after it."""
        groups = self._require_quiet(call)
        for group in groups:
            group.reshard()
        with torch.no_grad():
            yield
        for group in groups:
            group.generation.advance()

    # -- state dicts ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the averages, by the parameters' names, and the number of updates.

        Of sharded parameters they are ``DTensor``s over the averages' own memory, so that
        ``torch.distributed.checkpoint`` saves each rank's part, and loads it onto another mesh.
        """
        return {_AVERAGES: {**self._averages}, _UPDATES: self.updates}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict()`` gave, of any mesh; every rank calls it.

        Args:
            state_dict: tensors cut as the parameters, on another mesh (they are brought together),
                or whole.

        Raises:
            ValueError: if it is of other parameters; nothing is changed then.
        """
        given = state_dict.get(_AVERAGES, {})
        wrong = sorted(given.keys() ^ self._averages.keys())
        if _UPDATES not in state_dict or wrong:
            raise ValueError(
                "the state dict is not of these averages: "
                + (f"only one of both has {wrong[0]}" if wrong else f"it has no {_UPDATES!r}")
            )
        for name, average in self._averages.items():
            tensor = given[name]
            if not isinstance(tensor, torch.Tensor) or tensor.shape != average.shape:
                came = f"shape {tuple(tensor.shape)}" if hasattr(tensor, "shape") else repr(tensor)
                raise ValueError(
                    f"the state dict has {came} for the average of {name}, whose shape is "
                    f"{tuple(average.shape)}"
                )
        present = self._averaged()
        for name, average in self._averages.items():
            local_of(average).copy_(_cut(given[name], present.get(name, average)))
        self.updates = int(state_dict[_UPDATES])

    # -- the model --------------------------------------------------------------------------------

    def _local_averages(self) -> list[torch.Tensor]:
        return [local_of(average) for average in self._averages.values()]

    def _averaged(self) -> dict[str, torch.Tensor]:
        """Return the averaged tensors, as registered while the model is sharded."""
        found: dict[str, torch.Tensor] = {}
        for name, param in self._model.named_parameters():
            sharded = sharded_of(param)
            if sharded.requires_grad or name in self._averages:
                found[name] = sharded
        for name, buffer in self._model.named_buffers() if self._use_buffers else ():
            if buffer.is_floating_point():
                found[name] = buffer
        return found

    def _present(self) -> list[torch.Tensor]:
        """Return what this rank has in the model now, in the order of the averages.

        Raises:
            RuntimeError: naming the first parameter that is not as its average is.
        """
        found = self._averaged()
        for name, average in self._averages.items():
            form = _form(found[name]) if name in found else None
            if form != _form(average):
                raise RuntimeError(
                    f"{name} was of shape, placements and mesh {_form(average)} when it was "
                    f"averaged first, and is of {form} now; make the averages after fully_shard, "
                    "and after the model got its last shapes"
                )
        for name in found:
            if name not in self._averages:
                raise RuntimeError(
                    f"{name} was frozen or not there when these averages were made; make new ones "
                    "after the model is what it shall be, and load the state of these"
                )
        return [local_of(found[name]).detach() for name in self._averages]

    def _require_quiet(self, call: str) -> list[FSDPParamGroup]:
        """Return the groups of the model, if they are between steps.

        Raises:
            RuntimeError: if not.
        """
        found = dict.fromkeys(group_of(param) for param in self._model.parameters())
        groups = [group for group in found if group is not None]
        for group in groups:
            require_between_steps(group, call)
            if in_block(group):
                raise RuntimeError(
                    f"{call} was called inside unsharded(), where parameter group {group.name!r} "
                    "has full parameters, and what changed of them is in no shard yet; averages "
                    "are taken of shards: call it after the block"
                )
        return groups


def _require_decay(decay: object) -> None:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)):
        raise TypeError(f"decay is a {type(decay).__name__}; pass a number, or a function of one")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay is {decay}; pass a number from 0 to 1")


def _placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``value`` as ``like`` is: a ``DTensor`` over this memory, or this memory."""
    if not isinstance(like, DTensor):
        return value
    spec = spec_of(like)
    full = torch.empty(like.shape, dtype=value.dtype, device="meta")
    return make_dtensor(value, make_spec(spec.mesh, spec.placements, full))


def _cut(given: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``given``: cut as ``like``; cut otherwise; or whole."""
    if _form(given) == _form(like):
        return local_of(given).detach()
    full = given.full_tensor() if isinstance(given, DTensor) else given
    owner = owner_of(like)
    return full if owner is None else owner.shard_of(full)


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    placed = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else ()
    return (tuple(tensor.shape), *placed)
