"""Shadow parameters: the tensors that a step changes in the place of sharded parameters.

Owns their memory for a step, and the two forms of a parameter's state. A shadow is a plain tensor
over the memory of the shard, if the optimizer's rule is elementwise, or a copy of the shard where
its policy of offload wants the step; or both. What the policy gives back unmoved is not copied. It
refuses to know optimizers: ``shadow_optimizer`` puts shadows into one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import is_
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.runtime.devices import traits_of
from fullshard.sharding.base.compat import (
    gradients_of,
    local_shard,
    local_shards,
    make_dtensor,
    spec_of,
    specs_of,
)
from fullshard.sharding.optim.rules import STEP_NUMBERS
from fullshard.sharding.params.owner import Owner, owner_of

__all__ = ["Shadow", "Shadows", "UnlikeShards", "are_same", "await_copies", "moved_to_step"]


class UnlikeShards(Exception):
    """Something is cut otherwise than its parameter, so the step needs a ``DTensor``."""


class Shadow:
    """What is stepped in the place of one sharded parameter.

    Attributes:
        local: the parameter's shard, for which it was made.
        stepped: what is stepped.
        mover: who shards the parameter, if ``stepped`` is a copy.
    """

    def __init__(
        self, param: nn.Parameter, data: torch.Tensor, mover: Owner | None, *, plain: bool
    ) -> None:
        """Takes ``data``: the shard, or a copy of it where it is stepped."""
        self.mover = mover
        self.local = local_shard(param)
        self._spec = spec_of(cast(DTensor, param))
        self._plain = plain
        self._pairs: dict[str, tuple[Any, Any]] = {}  # of the state: what the user sees, and ours
        data = data.detach() if plain else make_dtensor(data, self._spec)
        self.stepped = nn.Parameter(data, requires_grad=param.requires_grad)
        if not plain:
            self.stepped.__dict__.update(param.__dict__)  # what the user put on it

    def local_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the local part of ``tensor``.

        Raises:
            UnlikeShards: if it is cut otherwise than the parameter.
        """
        if not isinstance(tensor, DTensor):
            raise UnlikeShards
        found, spec = spec_of(tensor), self._spec
        if found is not spec and (found.placements != spec.placements or found.mesh != spec.mesh):
            raise UnlikeShards
        return local_shard(tensor)

    def to_stepped(self, real: Any) -> Any:
        """Returns what is stepped of the user's state ``real``.

        Raises:
            UnlikeShards: if a part of it is cut otherwise than the parameter.
        """
        if not self._plain:
            return real
        stepped = {}
        for key, value in real.items():
            pair = self._pairs.get(key)
            if pair is None or pair[0] is not value:
                ours = self.local_of(value) if isinstance(value, DTensor) else value
                self._pairs[key] = pair = value, ours
            stepped[key] = pair[1]
        return stepped

    def to_real(self, real: Any, stepped: Any) -> Any:
        """Returns the user's state: ``real``, changed to what was ``stepped``."""
        if not self._plain:
            return stepped
        for key, ours in stepped.items():
            pair = self._pairs.get(key)
            if pair is None or pair[1] is not ours:
                self._pairs[key] = pair = self._seen(key, ours), ours
            real[key] = pair[0]
        return real

    def _seen(self, key: str, ours: Any) -> Any:
        cut = isinstance(ours, torch.Tensor) and ours.shape == self.local.shape
        return make_dtensor(ours, self._spec) if cut and key not in STEP_NUMBERS else ours


class Shadows:
    """The shadows of one optimizer's parameters.

    Attributes:
        of: the shadow of each parameter that has one.
        stepped: what is stepped, in the order of the groups: shadows, and the other parameters
            themselves.
        movers: of those that are copies, who shards the parameter.
    """

    def __init__(
        self, params: list[Any], known: dict[torch.Tensor, Shadow], *, plain: bool
    ) -> None:
        """Takes from ``known`` the shadows of parameters that lie where they lay."""
        self.of: dict[torch.Tensor, Shadow] = {}
        for param in dict.fromkeys(params):
            shadow = known.get(param)
            if shadow is None or shadow.local is not local_shard(param):
                shadow = _shadow_of(param, plain=plain)
            if shadow is not None:
                self.of[param] = shadow
        self.stepped = [self.of[each].stepped if each in self.of else each for each in params]
        self.movers = {param: each.mover for param, each in self.of.items() if each.mover}
        self._plain = plain
        self._params = params
        self._types = list(map(type, params))  # ``swap_tensors`` changes it
        self._sharded = list(self.of)
        self._locals = [shadow.local for shadow in self.of.values()]
        self._targets = [shadow.stepped for shadow in self.of.values()]

    def are_of(self, params: list[Any]) -> bool:
        """Tells whether they were made of ``params``, which lie where they lay."""
        return (
            are_same(params, self._params)
            and list(map(type, params)) == self._types
            and are_same(local_shards(self._sharded), self._locals)
        )

    def read_gradients(self) -> None:
        """Gives each shadow its part of the gradient: the memory itself, or a copy.

        Raises:
            UnlikeShards: if shadows are plain, and a gradient is cut otherwise than its parameter.
        """
        gradients: Sequence[torch.Tensor | None] = gradients_of(self._sharded)
        if self._plain:
            specs = specs_of(gradients), specs_of(self._sharded)
            for param, gradient, found, spec in zip(self._sharded, gradients, *specs, strict=True):
                if found is not spec and gradient is not None:
                    self.of[param].local_of(gradient)
            gradients = local_shards(gradients)
        if self.movers:
            gradients = [
                gradient if gradient is None or mover is None else moved_to_step(gradient, mover)
                for gradient, mover in zip(gradients, map(self.movers.get, self.of), strict=True)
            ]
        for target, gradient in zip(self._targets, gradients, strict=True):
            target.grad = gradient
        await_copies(
            mover for param, mover in self.movers.items() if _is_on_host(self.of[param].stepped)
        )

    def read(self) -> None:
        """Copies the parameters and their gradients anew, to the shadows that are copies."""
        for param in self.movers:
            _local_of(self.of[param].stepped).copy_(local_shard(param), non_blocking=True)
        self.read_gradients()

    def write_back(self) -> None:
        """Copies what was stepped to the parameters."""
        for param in self.movers:
            local_shard(param).copy_(_local_of(self.of[param].stepped), non_blocking=True)
        await_copies(mover for param, mover in self.movers.items() if _is_on_host(param))

    def drop_gradients(self) -> None:
        """Keeps no gradient's memory."""
        for target in self._targets:
            target.grad = None


def _shadow_of(param: Any, *, plain: bool) -> Shadow | None:
    """Returns a new shadow of ``param``; None if it is stepped itself."""
    if not isinstance(param, DTensor):
        return None
    owner, shard = owner_of(param), local_shard(param)
    if owner is None or owner.param.sharded is not param:
        data = shard
    else:
        data = moved_to_step(shard, owner)
    mover = None if data is shard else owner
    if mover is None and not plain:
        return None
    return Shadow(cast(nn.Parameter, param), data, mover, plain=plain)


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    return local_shard(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _is_on_host(tensor: torch.Tensor) -> bool:
    return not traits_of(_local_of(tensor).device).streams


def moved_to_step(tensor: torch.Tensor, owner: Owner) -> torch.Tensor:
    """Returns ``tensor``, a ``DTensor`` or not, where the parameter of ``owner`` is stepped."""
    offload, device = owner.param.offload, owner.group.device
    if not isinstance(tensor, DTensor):
        return offload.stage_step(tensor, device)
    local = local_shard(tensor)
    moved = offload.stage_step(local, device)
    return tensor if moved is local else make_dtensor(moved, spec_of(tensor))


def await_copies(owners: Iterable[Owner]) -> None:
    """Waits once per policy for what was copied to the host, which reads without a stream."""
    waits = {(id(each.param.offload), each.group.device): each for each in owners}
    for each in waits.values():
        each.param.offload.arrived(each.group.device)


def are_same(found: Collection[Any], known: Collection[Any]) -> bool:
    """Tells whether they hold the same objects: ``==`` of tensors is another question."""
    return len(found) == len(known) and all(map(is_, found, known))
