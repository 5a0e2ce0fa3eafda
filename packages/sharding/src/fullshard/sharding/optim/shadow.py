"""Shadow parameters: the tensors that a step changes in the place of sharded parameters.

Owns what one is, and how tensors come to where a policy of offload wants the step. A shadow is a
plain tensor over the memory of the shard, if the optimizer's rule is elementwise, or a copy of the
shard where its policy wants the step; or both. What the policy gives back unmoved is not copied. It
refuses to know optimizers: ``shadow_optimizer`` puts shadows into one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.runtime.devices import traits_of
from fullshard.sharding.base.compat import local_shard, make_dtensor, spec_of
from fullshard.sharding.optim.rules import STEP_NUMBERS
from fullshard.sharding.params.owner import owner_of
from fullshard.sharding.params.param import FSDPParam

__all__ = [
    "Shadow",
    "UnlikeShards",
    "await_copies",
    "is_on_host",
    "moved_to_step",
    "shadow_of",
]


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
        self, param: nn.Parameter, data: torch.Tensor, mover: FSDPParam | None, *, plain: bool
    ) -> None:
        """Takes ``data``: the shard, or a copy of it where it is stepped."""
        self.mover = mover
        self.local = local_shard(param)
        self._spec = spec_of(cast(DTensor, param))
        data = data.detach() if plain else make_dtensor(data, self._spec)
        self.stepped = nn.Parameter(data, requires_grad=param.requires_grad)
        if not plain:
            self.stepped.__dict__.update(param.__dict__)  # what the user put on it

    @property
    def data(self) -> torch.Tensor:
        """What is stepped, as a plain tensor."""
        stepped: torch.Tensor = self.stepped
        return local_shard(stepped) if isinstance(stepped, DTensor) else stepped.detach()

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

    def to_plain(self, real: dict[str, Any]) -> dict[str, Any]:
        """Returns the user's state with the local part of each tensor in it.

        Raises:
            UnlikeShards: if a part of it is cut otherwise than the parameter.
        """
        return {
            key: self.local_of(value) if isinstance(value, DTensor) else value
            for key, value in real.items()
        }

    def to_real(self, real: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
        """Returns the user's state ``real``, changed to what ``plain`` has become in the step."""
        for key, value in plain.items():
            known = real.get(key)
            if value is (local_shard(known) if isinstance(known, DTensor) else known):
                continue
            cut = isinstance(value, torch.Tensor) and value.shape == self.local.shape
            whole = not cut or key in STEP_NUMBERS
            real[key] = value if whole else make_dtensor(value, self._spec)
        return real


def shadow_of(param: Any, *, plain: bool) -> Shadow | None:
    """Returns a new shadow of ``param``; None if it is stepped itself."""
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
    """Returns ``tensor``, a ``DTensor`` or not, where the parameter of ``owner`` is stepped."""
    offload, device = owner.offload, owner.device
    if not isinstance(tensor, DTensor):
        return offload.stage_step(tensor, device)
    local = local_shard(tensor)
    moved = offload.stage_step(local, device)
    return tensor if moved is local else make_dtensor(moved, spec_of(tensor))


def await_copies(owners: Iterable[FSDPParam | None]) -> None:
    """Waits once per policy for what was copied to the host, which reads without a stream."""
    waits = {(id(each.offload), each.device): each for each in owners if each}
    for each in waits.values():
        each.offload.arrived(each.device)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` lies where reading waits for no stream."""
    return not traits_of(tensor.device).streams
