"""Exponential moving averages of a sharded model's parameters, on its shards.

Owns the averages: their update after each step, their turn in the model's place, and their state
dict. It sends nothing: an average of shards is a shard of the average. What an average is for, and
how fast it forgets, is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.sharding.access.averages import Average, update_averages
from fullshard.sharding.access.unsharded import in_block
from fullshard.sharding.base.checks import require_bool
from fullshard.sharding.groups.param_group import FSDPParamGroup, group_of
from fullshard.sharding.params.owner import owner_of

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
        """Starts with the present values, which the first update replaces, as torch's does.

        Args:
            model: the model, after ``fully_shard``, with values; any that holds sharded modules.
            decay: how much of an average stays in an update, from 0 to 1; or a function that says
                so, given how many updates there were: ``lambda n: min(0.999, (1 + n) / (10 + n))``
                follows a young model faster.
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
        place = None if device is None else torch.device(device)
        self._averages = {
            name: Average(name, value, dtype, place) for name, value in self._averaged().items()
        }

    # -- averaging --------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the present parameters; call it after ``optimizer.step()``.

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
        self._require_same()
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        _require_decay(decay)
        update_averages(list(self._averages.values()), decay if self.updates else 0.0)
        self.updates += 1

    # -- in the model -----------------------------------------------------------------------------

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Gives the model the averages inside a ``with`` block, and its own values after it."""
        self.swap_in()
        try:
            yield
        finally:
            self.swap_out()

    def swap_in(self) -> None:
        """Gives the model the averages, until ``swap_out()``; every rank calls it.

        Its own values are kept beside them meanwhile. Do not step an optimizer until then: what it
        changes is lost.

        Raises:
            RuntimeError: as ``update()`` does.
        """
        if self.in_use:
            raise RuntimeError("swap_in() was called twice; call swap_out() before")
        self._require_same()
        with self._changing("swap_in()"):
            self._replaced = [each.shard.to(each.value.device, copy=True) for each in self._all]
            for each in self._all:
                each.shard.copy_(each.value)
            self.in_use = True

    def swap_out(self) -> None:
        """Gives the model its own values back; every rank calls it.

        Raises:
            RuntimeError: if it has them, or as ``update()`` does.
        """
        if not self.in_use:
            raise RuntimeError("swap_out() was called, but the model has its own values")
        self._require_same()
        with self._changing("swap_out()"):
            for each, value in zip(self._all, self._replaced, strict=True):
                each.shard.copy_(value)
            self._replaced = []
            self.in_use = False

    @contextmanager
    def _changing(self, call: str) -> Iterator[None]:
        """For writing shards: nobody reads them meanwhile, and every copy is stale after it."""
        groups = self._require_quiet(call)
        for group in groups:
            group.reshard()
        with torch.no_grad():
            yield
        for group in groups:
            group.generation.advance()

    # -- state dicts ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages, by the parameters' names, and the number of updates.

        Of sharded parameters they are ``DTensor``s over the averages' own memory, so that
        ``torch.distributed.checkpoint`` saves each rank's part, and loads it onto another mesh.
        """
        averages = {name: each.as_parameter() for name, each in self._averages.items()}
        return {_AVERAGES: averages, _UPDATES: self.updates}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what ``state_dict()`` gave, of any mesh; every rank calls it.

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
        for name, each in self._averages.items():
            each.require_fits(given[name])
        for name, each in self._averages.items():
            each.load(given[name])
        self.updates = int(state_dict[_UPDATES])

    # -- the model --------------------------------------------------------------------------------

    @property
    def _all(self) -> list[Average]:
        return list(self._averages.values())

    def _averaged(self) -> dict[str, torch.Tensor]:
        """Returns what is averaged, as it is registered while the model is sharded."""
        found: dict[str, torch.Tensor] = {}
        for name, param in self._model.named_parameters():
            owner = owner_of(param)
            sharded = param if owner is None else owner.param.sharded
            if sharded.requires_grad:
                found[name] = sharded
        for name, buffer in self._model.named_buffers() if self._use_buffers else ():
            if buffer.is_floating_point():
                found[name] = buffer
        return found

    def _require_same(self) -> None:
        """Returns if what is averaged is what the model has.

        Raises:
            RuntimeError: naming the first parameter that is not.
        """
        present = self._averaged()
        for name, each in self._averages.items():
            each.follow(present.pop(name, each.source))
        if present:
            raise RuntimeError(
                f"{next(iter(present))} was frozen or not there when these averages were made; "
                "make new ones after the model is what it shall be, and load the state of these"
            )

    def _require_quiet(self, call: str) -> list[FSDPParamGroup]:
        """Returns the groups of the model, if they are between steps.

        Raises:
            RuntimeError: if not.
        """
        found = dict.fromkeys(group_of(param) for param in self._model.parameters())
        groups = [group for group in found if group is not None]
        for group in groups:
            if group.leases.in_use:
                raise RuntimeError(
                    f"{call} was called while parameter group {group.name!r} is in the middle of "
                    "its forward or backward; call it between steps"
                )
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
