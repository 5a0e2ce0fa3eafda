"""What the modules hold of a group's parameters: the sharded ones or the unsharded ones.

Owns the swap of all of them at once, which each gather and each reshard does. It looks at nothing
but where a parameter goes and the parameter: following each from object to object would cost more
than all the rest, since little of it is still in a cache by then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fullshard.sharding.param import FSDPParam
from fullshard.sharding.touch import Guard

__all__ = ["Swap"]

_Entry = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]


class Swap:
    """The places of some parameters, as a list for either state."""

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        """Looks at the parameters when they are swapped first, and when one has changed since."""
        self._params = params
        self._changes = -1
        self._sharded: list[nn.Parameter] = []
        self._unsharded: list[nn.Parameter] = []
        self._to_sharded: list[_Entry] = []
        self._to_unsharded: list[_Entry] = []
        self._guards: list[Guard] = []
        self._flags: list[bool] = []

    def to_unsharded(self) -> None:
        """Puts the unsharded parameters into every place.

        Raises:
            RuntimeError: naming one in whose place there is something else.
        """
        self._look()
        if [param.requires_grad for param in self._sharded] != self._flags:
            self.sync_requires_grad()
        for places, name, param, sharded in self._to_unsharded:
            if places[name] is not sharded and places[name] is not param:
                self._refuse(places[name], param)
            places[name] = param
        for guard in self._guards:
            guard.open()

    def to_sharded(self) -> None:
        """Puts the sharded parameters into every place."""
        self._look()
        if [param.requires_grad for param in self._unsharded] != self._flags:
            self.sync_requires_grad()
        for places, name, param, _ in self._to_sharded:
            places[name] = param
        for guard in self._guards:
            guard.shut()

    def _refuse(self, found: torch.Tensor | None, unsharded: nn.Parameter) -> None:
        self.to_sharded()
        name = next(param.name for param in self._params if param.unsharded is unsharded)
        kind = "None" if found is None else f"a {type(found).__name__}"
        raise RuntimeError(
            f"{name} is sharded, but its module was given {kind} in its place, which the forward "
            "of a sharded module does not use; torch.func.functional_call does that, and assigning "
            "a parameter. Change values in place, or load a state dict; to compute with other "
            "parameters, use a copy of the model that is not sharded"
        )

    def sync_requires_grad(self) -> None:
        """Gives both of each the flag that was set on either since they last agreed."""
        for param in self._params:
            param.sync_requires_grad()
        self._flags = [param.requires_grad for param in self._params]

    def _look(self) -> None:
        if self._changes == FSDPParam.changes:
            return
        self._changes = FSDPParam.changes
        params = self._params
        self._sharded = [param.sharded for param in params]
        self._unsharded = [param.unsharded for param in params]
        places = [(param, place) for param in params for place in param.places]
        self._to_sharded = [
            (place.module._parameters, place.name, param.sharded, param.unsharded)
            for param, place in places
        ]
        self._to_unsharded = [
            (place.module._parameters, place.name, param.unsharded, param.sharded)
            for param, place in places
        ]
        self._guards = [guard for param in params for guard in param.guards]
        self.sync_requires_grad()
