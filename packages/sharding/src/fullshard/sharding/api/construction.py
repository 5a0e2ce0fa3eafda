"""The making of a sharded module: its groups, its state, its class.

Owns the order of it: groups are built first, which may raise and leaves the modules as they were;
what follows changes them and does not raise. It communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fullshard.sharding.access.state_dict import attach_state_dict_hooks
from fullshard.sharding.api.managed import Managed
from fullshard.sharding.api.placements import Cut
from fullshard.sharding.base.compat import mark_sharded
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.context import RootContext
from fullshard.sharding.hooks.initialise import initialise_root
from fullshard.sharding.hooks.module_state import ModuleState
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo, device_of_mesh
from fullshard.sharding.optim.step_hooks import watch_optimizers
from fullshard.sharding.params.data_setter import take_over_data
from fullshard.sharding.params.owner import Owner, set_owner
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.replaced import release_replaced
from fullshard.sharding.params.touch import unguard
from fullshard.sharding.protocols import Policies

__all__ = ["Construction", "construct"]


@dataclass(frozen=True, kw_only=True)
class Construction:
    """What one call of ``fully_shard`` or ``replicate`` is to make, checked.

    Attributes:
        modules: the modules.
        mesh_info: the mesh of the call.
        policies: what is asked of the user.
        post_forward: the post-forward mesh of each process group that shards, if it has one.
        class_of: the class that a module of a class becomes one of.
    """

    modules: tuple[nn.Module, ...]
    mesh_info: FSDPMeshInfo
    policies: Policies
    post_forward: Mapping[dist.ProcessGroup, FSDPMeshInfo]
    class_of: Callable[[type], type]

    @property
    def device(self) -> torch.device:
        """Where the modules compute."""
        return device_of_mesh(self.mesh_info.mesh)


def construct(made: Construction, managed: Managed, cuts: Sequence[Cut]) -> None:
    """Makes the modules of ``made`` what it says.

    Args:
        made: what to make.
        managed: their parameters.
        cuts: how each of those is sharded, in the order of ``managed.places``.
    """
    context = RootContext(made.device)
    groups = _make_groups(made, managed, cuts, context)
    watch_optimizers(group for _, group in groups)
    take_over_data()
    # Nothing raises from here on: until now the modules are as they were.
    for originals, group in groups:
        _install(originals, group)
    _move_buffers(made)
    for tied in managed.tied:
        if tied.place not in tied.param.places:
            tied.param.add_place(tied.place)
            attach_state_dict_hooks(tied.group, [tied.place.module])
    for _, group in groups:
        group.reshard_to(made.post_forward.get(group.mesh_info.shard_process_group))
    state = ModuleState(
        made.modules,
        [group for _, group in groups],
        [tied.group for tied in managed.tied],
        made.mesh_info,
        context,
        made.policies,
    )
    state.attach(initialise_root)
    unguard(made.modules)
    for group in state.groups:
        group.gathering.register()
    for module in made.modules:
        module.__class__ = made.class_of(type(module))
        mark_sharded(module)


def _make_groups(
    made: Construction, managed: Managed, cuts: Sequence[Cut], context: RootContext
) -> list[tuple[list[nn.Parameter], FSDPParamGroup]]:
    """Returns a group, and the parameters it replaces, for each set of process groups.

    The groups are in the order of their first parameter, which all ranks see alike.
    """
    members: dict[tuple[dist.ProcessGroup, ...], list[tuple[nn.Parameter, FSDPParam]]] = {}
    home = made.policies.offload.home(made.device)
    for (original, places), cut in zip(managed.places.items(), cuts, strict=True):
        source = original if original.device.type in ("meta", home.type) else _moved(original, home)
        name = managed.names[original]
        param = FSDPParam(source, places, cut.mesh_info, cut.dim, made.policies.offload, name)
        key = (cut.mesh_info.shard_process_group, *cut.mesh_info.process_groups)
        members.setdefault(key, []).append((original, param))
    groups = []
    for pairs in members.values():
        params = [param for _, param in pairs]
        mesh_info = params[0].mesh_info
        group = FSDPParamGroup(params, mesh_info, made.device, made.policies, context.shared)
        groups.append(([original for original, _ in pairs], group))
    return groups


def _install(originals: Sequence[nn.Parameter], group: FSDPParamGroup) -> None:
    for original, param in zip(originals, group.params, strict=True):
        set_owner(original, Owner(param, group))
        set_owner(param.sharded, Owner(param, group))
        release_replaced(original)
    modules = {place.module for param in group.params for place in param.places}
    attach_state_dict_hooks(group, modules)


def _moved(original: nn.Parameter, home: torch.device) -> nn.Parameter:
    moved = nn.Parameter(original.detach().to(home), requires_grad=original.requires_grad)
    for name, value in original.__dict__.items():
        moved.__dict__.setdefault(name, value)  # what a wrapper subclass is made of stays as moved
    return moved


def _move_buffers(made: Construction) -> None:
    """Moves buffers to where the model computes, as torch's own does; meta ones stay."""
    for module in made.modules:
        for sub in module.modules():
            for name, buffer in sub._buffers.items():
                if buffer is not None and buffer.device.type not in ("meta", made.device.type):
                    sub._buffers[name] = buffer.to(made.device)
