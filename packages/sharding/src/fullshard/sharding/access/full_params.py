"""One group's full parameters for a block of code: those that forward uses, or copies.

Owns getting them, putting the shards back, and cutting changed values into the shards. When, for
which groups and on which ranks is ``unsharded``'s affair. [Note: two ways] *Leased* parameters are
those that forward uses, in the dtype in which they are gathered; a lease keeps them, so a forward
gathers nothing. *Copied* ones are full tensors in the dtype in which they are stored, which no
forward uses; the group stays sharded behind them, and only one parameter at a time is whole on the
device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fullshard.sharding.base.compat import local_shard, make_dtensor, spec_of
from fullshard.sharding.base.leases import LeaseKind
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.params.param import FSDPParam

__all__ = ["CopiedParams", "FullParams", "LeasedParams", "Mode"]

_owners = itertools.count(-1, -1)  # forwards are the owners above 0


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a block gives full parameters.

    Attributes:
        writeback: what was changed is written into the shards.
        rank0_only: only the first rank of a group's mesh has them.
        copied: they are copies in the dtype in which they are stored.
        on_cpu: the copies are on the CPU; else where the model computes.
    """

    writeback: bool
    rank0_only: bool
    copied: bool
    on_cpu: bool

    @property
    def ordinary(self) -> bool:
        """Whether every rank has the parameters that forward uses."""
        return not self.rank0_only and not self.copied

    def open(self, group: FSDPParamGroup) -> FullParams:
        """Returns the full parameters of ``group``, which it does not have yet."""
        return CopiedParams(group, self) if self.copied else LeasedParams(group, self)


class FullParams:
    """The full parameters of one group.

    Attributes:
        group: the group.
        mode: that of the block that opened it.
        holds: whether this rank has them.
        writeback: that block, or one inside it, writes back.
        failed: a block inside it that writes back raised.
    """

    def __init__(self, group: FSDPParamGroup, mode: Mode) -> None:
        """Changes nothing yet."""
        self.group = group
        self.mode = mode
        self.holds = not mode.rank0_only or _is_first(group.mesh_info.mesh)
        self.writeback = mode.writeback
        self.failed = False

    def launch(self) -> None:
        """Starts getting them."""
        raise NotImplementedError

    def finish(self) -> None:
        """Waits until the modules hold them, on the ranks that do."""
        raise NotImplementedError

    def problem(self) -> str:
        """Returns why what the modules hold cannot be written back; empty if it can."""
        if not self.holds:
            return ""
        for param in self.group.params:
            found = _registered(param)
            if found is None or found.shape != self._own(param).shape:
                what = "nothing" if found is None else f"a tensor of shape {tuple(found.shape)}"
                return (
                    f"{param.name} was replaced by {what} inside unsharded(), so it cannot be "
                    f"written back; its shape must stay {tuple(self._own(param).shape)}"
                )
        return ""

    def write_back(self) -> None:
        """Cuts what the modules hold into the shards."""
        raise NotImplementedError

    def release(self) -> None:
        """Puts the sharded parameters back."""
        raise NotImplementedError

    def _own(self, param: FSDPParam) -> torch.Tensor:
        """Returns what was registered for ``param`` at the beginning."""
        raise NotImplementedError

    def _value(self, param: FSDPParam) -> torch.Tensor:
        """Returns what the modules hold: what was registered, or a tensor that replaced it."""
        found = _registered(param)
        return self._own(param) if found is None or found is param.sharded else found


class LeasedParams(FullParams):
    """See [Note: two ways]."""

    def __init__(self, group: FSDPParamGroup, mode: Mode) -> None:
        """Changes nothing yet."""
        super().__init__(group, mode)
        self._owner = next(_owners)
        self._gathers = 0

    def launch(self) -> None:
        """Takes a lease and issues the gather, on every rank."""
        self.group.refresh()
        self.group.leases.take(LeaseKind.BLOCK, self._owner)
        self.group.gathering.unshard(async_op=True)

    def finish(self) -> None:
        """Waits for the gather; ranks that are not to have the parameters free them."""
        self.group.wait_for_unshard()
        self._gathers = self.group.gathering.gathers
        if not self.holds:
            self.release()

    def problem(self) -> str:
        """Returns why what the modules hold cannot be written back; empty if it can."""
        intact = self.group.leases.held_by(LeaseKind.BLOCK, self._owner)
        gathers = self.group.gathering.gathers
        if self.holds and (not intact or gathers not in (self._gathers, 0)):
            return (
                f"parameter group {self.group.name!r} was resharded or gathered anew inside "
                "unsharded(writeback=True), by reshard(), state_dict(), to() or a forward after an "
                "optimizer's step, so changes made before are lost; do that outside of the block"
            )
        return super().problem()

    def write_back(self) -> None:
        """Cuts what the modules hold into the shards."""
        for param in self.group.params:
            value = self._value(param) if self.holds else param.unsharded
            if self.mode.rank0_only:
                value = self._from_first(param, value)
            _store(param, param.shard_of(value.detach()))

    def _from_first(self, param: FSDPParam, value: torch.Tensor) -> torch.Tensor:
        """Returns the first rank's ``value`` on all ranks, placed as modules see it."""
        local = local_shard(value) if isinstance(value, DTensor) else value.detach()
        if not self.holds:  # its memory was freed
            local = torch.empty(local.shape, dtype=local.dtype, device=self.group.device)
        mesh = self.group.mesh_info.mesh
        everywhere = (Replicate(),) * mesh.ndim
        local = _cut_from_first(local.to(param.gather_spec.dtype), mesh, everywhere)
        if isinstance(param.unsharded, DTensor):
            return make_dtensor(local, spec_of(param.unsharded))
        return local

    def release(self) -> None:
        """Gives the lease back, and what a forward inside the block kept."""
        self.group.gathering.register()  # what was put into the place of a parameter was read
        self.group.leases.give_back(LeaseKind.BLOCK, self._owner)
        if self.mode.rank0_only:
            for param in self.group.params:  # frozen on this rank only, it would be so nowhere else
                param.unsharded.requires_grad = param.sharded.requires_grad
        self.group.drop_leases(LeaseKind.GRAPH, LeaseKind.PREFETCH, LeaseKind.KEPT)
        self.group.copied = False
        self.group.gathering.register()  # a user's own unshard() may hold it

    def _own(self, param: FSDPParam) -> torch.Tensor:
        return param.unsharded


class CopiedParams(FullParams):
    """See [Note: two ways]."""

    def __init__(self, group: FSDPParamGroup, mode: Mode) -> None:
        """Changes nothing yet."""
        super().__init__(group, mode)
        self._copies: dict[FSDPParam, nn.Parameter] = {}

    def launch(self) -> None:
        """Reshards the group."""
        self.group.reshard()

    def finish(self) -> None:
        """Gathers one parameter after the other, and registers its copy."""
        device = torch.device("cpu") if self.mode.on_cpu else self.group.device
        self.group.copied = True
        for param in self.group.params:
            full = _on_mesh(param.sharded).full_tensor()
            if self.holds:
                copy = nn.Parameter(full.to(device, copy=True), requires_grad=param.requires_grad)
                copy.__dict__.update(param.sharded.__dict__)
                self._copies[param] = copy
                for place in param.places:
                    place.module._parameters[place.name] = copy
        self.group.gathering.lend()

    def write_back(self) -> None:
        """Cuts what the modules hold into the shards."""
        for param in self.group.params:
            sharded = _on_mesh(param.sharded)
            mesh, placements = sharded.device_mesh, sharded.placements
            if self.holds:
                value = self._value(param).detach().to(mesh.device_type, sharded.dtype)
            else:
                value = torch.empty(sharded.shape, dtype=sharded.dtype, device=sharded.device)
            if self.mode.rank0_only:
                _store(param, _cut_from_first(value, mesh, placements))
            else:
                cut = distribute_tensor(value, mesh, placements, src_data_rank=None)
                _store(param, local_shard(cut))

    def release(self) -> None:
        """Lets the copies go."""
        self.group.copied = False
        self.group.gathering.register()  # a user's own unshard() may hold it

    def _own(self, param: FSDPParam) -> torch.Tensor:
        return self._copies[param]


def _is_first(mesh: DeviceMesh) -> bool:
    coordinate = mesh.get_coordinate()
    return coordinate is not None and not any(coordinate)


def _registered(param: FSDPParam) -> torch.Tensor | None:
    place = param.places[0]
    return place.module._parameters.get(place.name)


def _on_mesh(sharded: nn.Parameter) -> DTensor:
    """Returns ``sharded`` outside autograd, on its mesh's device: shards may live on the CPU."""
    tensor = sharded.detach()
    assert isinstance(tensor, DTensor), "fully_shard makes DTensors"
    kind = tensor.device_mesh.device_type
    return tensor if tensor.device.type == kind else cast(DTensor, tensor.to(kind))


def _cut_from_first(
    value: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> torch.Tensor:
    """Returns this rank's part of what the first rank of ``mesh`` passes."""
    source: int | None = 0
    value = value.detach().contiguous()
    if any(type(each) not in (Shard, Replicate) for each in placements):
        # torch scatters strided shards (tensor parallelism) only where they are even
        value = local_shard(distribute_tensor(value, mesh, [Replicate()] * mesh.ndim))
        source = None
    return local_shard(distribute_tensor(value, mesh, placements, src_data_rank=source))


def _store(param: FSDPParam, part: torch.Tensor) -> None:
    """Writes ``part`` into the shard.

    What was gathered in another dtype and did not change keeps the value that is stored.
    """
    shard = param.shard
    part = part.detach().to(shard.device)
    if part.dtype != shard.dtype:
        part = torch.where(part == shard.to(part.dtype), shard, part.to(shard.dtype))
    shard.copy_(part)
