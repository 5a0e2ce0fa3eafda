"""One group's full parameters for a block of code: those that forward uses, or copies.

Owns getting them, putting the shards back, and cutting changed values into the shards. When, for
which groups and on which ranks is ``unsharded``'s affair. [Note: two ways] *Leased* parameters are
those that forward uses, in the dtype in which they are gathered; a lease keeps them, so a forward
gathers nothing. *Copied* ones are full tensors in the dtype in which they are stored, which no
forward uses; the group stays sharded behind them, and only one parameter at a time is whole on the
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.comm.spi import carrier_of
from fullshard.sharding.base.compat import local_of, make_dtensor, spec_of
from fullshard.sharding.base.memory import storage_object
from fullshard.sharding.base.states import LeaseKind
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.mesh.mesh_info import device_of_mesh
from fullshard.sharding.params.param import FSDPParam

__all__ = ["CopiedParams", "FullParams", "LeasedParams", "Mode"]


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
        """Return the full parameters of ``group``, which it does not have yet."""
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
        """Change nothing yet."""
        self.group = group
        self.mode = mode
        self.holds = not (mode.rank0_only and any(group.mesh_info.mesh.get_coordinate() or ()))
        self.writeback = mode.writeback
        self.failed = False

    def launch(self) -> None:
        """Start getting them."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until the modules hold them."""

    def release(self) -> None:
        """Put the sharded parameters back."""
        self.group.copied = False
        self.group.gathering.register()  # a user's own unshard() may hold it

    def problem(self) -> str:
        """Return why what the modules hold cannot be written back; empty if it can."""
        for param in self.group.params if self.holds else ():
            place, shape = param.places[0], self._given(param).shape
            found = place.held
            if found is None or found.shape != shape:
                what = "nothing" if found is None else f"a tensor of shape {tuple(found.shape)}"
                return (
                    f"{param.name} was replaced by {what} inside unsharded(), so it cannot be "
                    f"written back; its shape must stay {tuple(shape)}"
                )
        return ""

    def write_back(self) -> None:
        """Cuts what the modules hold into the shards; with ``rank0_only``, on the first rank."""
        for param in self.group.params:
            place, given = param.places[0], self._given(param)
            found = place.held
            put = found is not None and found is not param.sharded  # by a user, or by us
            value = cast(torch.Tensor, found) if put and self.holds else given
            if self.mode.rank0_only:
                value = self._from_first(value, given)
            part = param.shard_of(value.detach().to(self.group.device))
            _store(param, part, self.arrived(param))

    def _from_first(self, value: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return the first rank's ``value`` on all ranks, as ``given`` is placed."""
        local = local_of(value).detach()
        device, mesh = self.group.device, self.group.mesh_info.mesh
        if self.holds:
            local = local.to(device, given.dtype).contiguous()
        else:  # its memory was freed
            local = torch.empty(local.shape, dtype=given.dtype, device=device)
        _send_from_first(local, mesh)
        return make_dtensor(local, spec_of(given)) if isinstance(given, DTensor) else local

    def _given(self, param: FSDPParam) -> torch.Tensor:
        """Return the tensor registered for ``param`` at the beginning, or an equivalent one."""
        raise NotImplementedError

    def arrived(self, param: FSDPParam) -> torch.Tensor:
        """Return the shard with the values that a gather delivered."""
        return param.shard


class LeasedParams(FullParams):
    """See [Note: two ways]."""

    def __init__(self, group: FSDPParamGroup, mode: Mode) -> None:
        """Change nothing yet."""
        super().__init__(group, mode)
        self._gathers = 0
        self._storages: list[torch.UntypedStorage | None] = []

    def launch(self) -> None:
        """Take a lease and issue the gather; ranks that are not to have them free them."""
        self.group.drop_stale()
        self.group.gathering.drop_copies()
        self.group.leases.add_once(LeaseKind.BLOCK)
        self.group.shared.streams.synchronize_with_current()  # which may have changed shards
        self.group.gathering.launch_gather(async_op=True)
        if not self.holds:
            self.group.wait_for_unshard()
            self.release()

    def finish(self) -> None:
        """Wait for the gather, on ranks that are to have the parameters."""
        if self.holds:
            self.group.wait_for_unshard()
            self._gathers = self.group.gathering.gathers
            self._storages = [storage_object(param.unsharded) for param in self.group.params]

    def problem(self) -> str:
        """Return why what the modules hold cannot be written back; empty if it can."""
        intact = LeaseKind.BLOCK in self.group.leases.out
        gathers = self.group.gathering.gathers
        if self.holds and (not intact or gathers not in (self._gathers, 0)):
            return (
                f"parameter group {self.group.name!r} was resharded or gathered anew inside "
                "unsharded(writeback=True), by reshard(), state_dict(), to() or a forward after an "
                "optimizer's step, so changes made before are lost; do that outside of the block"
            )
        params = self.group.params if self._storages else ()  # none on ranks without parameters
        for param, storage in zip(params, self._storages, strict=True):
            kept = param.unsharded  # a DTensor if tensor parallelism cut it; see [Note: data]
            if isinstance(kept, DTensor) and storage_object(kept) is not storage:
                return (
                    f"{param.name}.data was set inside unsharded(writeback=True), but a DTensor "
                    "keeps its local shard, so the new values would be lost; copy them in place, "
                    "as param.copy_(new)"
                )
        return super().problem()

    def release(self) -> None:
        """Give the lease back, and what a forward inside the block kept."""
        self.group.gathering.register()  # what was put into the place of a parameter was read
        if self.mode.rank0_only:
            for param in self.group.params:  # requires_grad may have changed on this rank only
                param.unsharded.requires_grad = param.sharded.requires_grad
        held = (LeaseKind.BLOCK, LeaseKind.GRAPH, LeaseKind.PREFETCH, LeaseKind.KEPT)
        self.group.drop_leases(*held)
        super().release()

    def _given(self, param: FSDPParam) -> torch.Tensor:
        return param.unsharded

    def arrived(self, param: FSDPParam) -> torch.Tensor:
        """Return the shard with the values that a gather delivered."""
        return self.group.gathering.setup.prepare().inputs.arrived(param)


class CopiedParams(FullParams):
    """See [Note: two ways]."""

    def __init__(self, group: FSDPParamGroup, mode: Mode) -> None:
        """Change nothing yet."""
        super().__init__(group, mode)
        self._copies: dict[FSDPParam, nn.Parameter] = {}

    def launch(self) -> None:
        """Reshard the group, gather one parameter after the other, and register its copy."""
        self.group.reshard()
        device = torch.device("cpu") if self.mode.on_cpu else self.group.device
        self.group.copied = True
        for param in self.group.params:
            full = _on_carrier(param.sharded).full_tensor()
            if self.holds:
                copy = nn.Parameter(
                    full.to(device, copy=True), requires_grad=param.sharded.requires_grad
                )
                copy.__dict__.update(param.sharded.__dict__)
                self._copies[param] = copy
                for place in param.places:
                    place.module._parameters[place.name] = copy
        self.group.gathering.swap.forget()

    def _given(self, param: FSDPParam) -> torch.Tensor:
        if self.holds:
            return self._copies[param]
        return torch.empty(param.shape, dtype=param.sharded.dtype, device="meta")


def _on_carrier(sharded: nn.Parameter) -> DTensor:
    """Return ``sharded`` outside autograd, on the device on which its mesh's collectives run."""
    tensor = cast(DTensor, sharded.detach())
    mesh = tensor.device_mesh
    return cast(DTensor, tensor.to(carrier_of(mesh.get_group(0), device_of_mesh(mesh))))


def _send_from_first(values: torch.Tensor, mesh: DeviceMesh) -> None:
    """Copy the values of the first rank of ``mesh`` to all its ranks, axis by axis, in place.

    Args:
        values: a contiguous tensor on the device of ``mesh``.
        mesh: all its ranks call this.
    """
    if values.numel() == 0:
        return
    flat = values.reshape(-1).view(torch.uint8)  # gloo knows fewer dtypes
    for process_group in mesh.get_all_groups():
        sent = flat.to(carrier_of(process_group, values.device))
        dist.broadcast(sent, group=process_group, group_src=0)
        if sent is not flat:
            flat.copy_(sent)


def _store(param: FSDPParam, part: torch.Tensor, arrived: torch.Tensor) -> None:
    """Write ``part`` into the shard.

    An element that did not change since it ``arrived`` keeps its stored value, also if the two
    differ.
    """
    shard = param.shard
    part = part.detach().to(shard.device)
    if arrived is not shard or part.dtype is not shard.dtype:
        same = part == arrived.to(part.dtype)
        part = torch.where(same, shard, part.to(shard.dtype))
    shard.copy_(part)
