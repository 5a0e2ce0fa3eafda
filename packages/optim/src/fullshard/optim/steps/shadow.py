"""The shadow of one sharded parameter: a parameter that the optimizer steps instead.

The main class is ``Shadow``. Moves shards, gradients and state to the device on which the offload
policy steps. Leaves the optimizer around the parameters to ``shadow_optimizer``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.spi import STEP_NUMBERS
from fullshard.comm.spi import traits_of
from fullshard.sharding import FSDPParam
from fullshard.sharding.spi import local_of, local_shard, make_dtensor, owner_of, spec_of

__all__ = ["Shadow", "UnlikeShards", "await_copies", "is_on_host", "moved_to_step", "shadow_of"]


class UnlikeShards(Exception):
    """A state or gradient has other placements than its parameter: the step needs a ``DTensor``."""


class Shadow:
    """A parameter that the optimizer steps instead of one sharded parameter.

    Attributes:
        local: the shard for which the shadow was made.
        stepped: the parameter to step.
        mover: the owner of the sharded parameter, if ``stepped`` is a copy.
    """

    def __init__(
        self, param: nn.Parameter, data: torch.Tensor, mover: FSDPParam | None, *, plain: bool
    ) -> None:
        """Take ``data``: the shard, or a copy of it on the device of the step."""
        self.mover = mover
        self.local = local_shard(param)
        self._spec = spec_of(cast(DTensor, param))
        data = data.detach() if plain else make_dtensor(data, self._spec)
        self.stepped = nn.Parameter(data, requires_grad=param.requires_grad)
        if not plain:
            self.stepped.__dict__.update(param.__dict__)  # attributes that the user set

    @property
    def data(self) -> torch.Tensor:
        """The stepped values, as a plain tensor."""
        return local_of(self.stepped).detach()

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the local part of ``tensor``.

        Raises:
            UnlikeShards: if it has other placements than the parameter.
        """
        if not isinstance(tensor, DTensor):
            raise UnlikeShards
        found, spec = spec_of(tensor), self._spec
        if found is not spec and (found.placements != spec.placements or found.mesh != spec.mesh):
            raise UnlikeShards
        return local_shard(tensor)

    def to_plain(self, real: dict[str, Any]) -> dict[str, Any]:
        """Return the user's state with the local part of each ``DTensor``.

        Raises:
            UnlikeShards: if a tensor has other placements than the parameter.
        """
        return {
            key: self.part_of(value) if isinstance(value, DTensor) else value
            for key, value in real.items()
        }

    def to_real(self, real: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
        """Return the user's state ``real``, updated from ``plain`` after a step."""
        for key, value in plain.items():
            known = real.get(key)
            if value is (local_shard(known) if isinstance(known, DTensor) else known):
                continue
            cut = isinstance(value, torch.Tensor) and value.shape == self.local.shape
            whole = not cut or key in STEP_NUMBERS
            real[key] = value if whole else make_dtensor(value, self._spec)
        return real


def shadow_of(param: Any, *, plain: bool) -> Shadow | None:
    """Return a new shadow of ``param``; None if the optimizer steps ``param`` itself."""
    if not isinstance(param, DTensor):
        return None
    owner, shard = owner_of(param), local_shard(param)
    data = shard
    if owner is not None and owner.sharded is param:
        data = moved_to_step(shard, owner)
    mover = None if data is shard else owner
    if mover is None and not plain:
        return None
    return Shadow(cast(nn.Parameter, param), data, mover, plain=plain)


def moved_to_step(tensor: torch.Tensor, owner: FSDPParam) -> torch.Tensor:
    """Return ``tensor``, moved to the device on which the parameter of ``owner`` is stepped."""
    offload, device = owner.offload, owner.device
    if not isinstance(tensor, DTensor):
        return offload.stage_step(tensor, device)
    local = local_shard(tensor)
    moved = offload.stage_step(local, device)
    return tensor if moved is local else make_dtensor(moved, spec_of(tensor))


def await_copies(owners: Iterable[FSDPParam | None]) -> None:
    """Wait for copies to the host, once per policy: the host reads without a stream."""
    waits = {(id(each.offload), each.device): each for each in owners if each}
    for each in waits.values():
        each.offload.arrived(each.device)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether the device of ``tensor`` has no streams, so that reads wait for nothing."""
    return not traits_of(tensor.device).queued
