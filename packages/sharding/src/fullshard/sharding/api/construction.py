"""The making of a sharded module: its groups, its state, its class.

Owns the order of it: groups are built first, which may raise and leaves the modules as they were;
what follows changes them and does not raise. It communicates nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from fullshard.comm.spi import EXTENSIONS, import_installed
from fullshard.sharding.access.state_dict import attach_state_dict_hooks
from fullshard.sharding.api.managed import Managed
from fullshard.sharding.api.module import FSDPModule, mixed_class_of
from fullshard.sharding.base.compat import (
    hooks_after_accumulation,
    hooks_on_gradient,
    mark_sharded,
)
from fullshard.sharding.base.policies import Policies
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.context import RootContext
from fullshard.sharding.hooks.initialise import initialise_root
from fullshard.sharding.hooks.module_state import ModuleState
from fullshard.sharding.mesh.mesh_info import device_of_mesh
from fullshard.sharding.mesh.placements import Placed
from fullshard.sharding.optim.step_hooks import watch_optimizers
from fullshard.sharding.params.lookup import release_replaced, set_owner
from fullshard.sharding.params.param import Cut, FSDPParam
from fullshard.sharding.params.sharded_access_errors import unguard

__all__ = ["construct"]


def construct(
    modules: tuple[nn.Module, ...],
    managed: Managed,
    placed: Placed,
    policies: Policies,
    mixin: type[FSDPModule],
) -> None:
    """Shard ``modules``, all of whose arguments were checked.

    Args:
        modules: the modules.
        managed: their parameters.
        placed: the mesh of the call, and what is kept over which axes.
        policies: what is asked of the user.
        mixin: what the modules' classes will extend.
    """
    import_installed(EXTENSIONS)
    mesh_info = placed.mesh_info
    device = device_of_mesh(mesh_info.mesh)
    context = RootContext(device)
    made = {
        _cut(original, cut, policies, device): original for original, cut in managed.cuts.items()
    }
    _warn_of_hooks(made)
    groups = [FSDPParamGroup(each, policies, context.shared) for each in _by_process_groups(made)]
    for group in groups:
        group.gathering.setup.set_post_forward_mesh(placed.post_forward_mesh(group.mesh_info))
    watch_optimizers(groups)
    # No error is raised below; up to here the modules are unchanged.
    for group in groups:
        for param in group.params:
            set_owner(made[param], param)
            set_owner(param.sharded, param)
            release_replaced(made[param])
        attach_state_dict_hooks(group, {place.module for p in group.params for place in p.places})
        group.gathering.keep_full(placed.keeps_full)
        group.gradients.early_reduction = placed.early_reduction
    _move_buffers(modules, device)
    borrowed = []
    for place, owner in managed.tied.items():
        borrowed.append(cast(FSDPParamGroup, owner.group))
        if place not in owner.places:
            owner.add_place(place)
            attach_state_dict_hooks(borrowed[-1], [place.module])
    state = ModuleState(modules, groups, borrowed, mesh_info, context, policies)
    state.attach(initialise_root)
    unguard(modules)
    for group in state.groups:
        group.gathering.register()
    for module in modules:
        module.__class__ = mixed_class_of(mixin, type(module))
        mark_sharded(module)


def _cut(param: nn.Parameter, cut: Cut, policies: Policies, device: torch.device) -> FSDPParam:
    """Return ``param``, sharded where ``policies`` say that it lives; it stays as it is."""
    source, home = param, policies.offload.home(device)
    if param.device.type not in ("meta", home.type):
        source = nn.Parameter(param.detach().to(home), requires_grad=param.requires_grad)
        for name, value in param.__dict__.items():
            source.__dict__.setdefault(name, value)  # a wrapper subclass is made of what moved
    try:
        dtypes = policies.precision.for_parameter(param)
    except Exception as error:
        error.add_note(f"while asking the precision policy about {cut.name}")
        raise
    return FSDPParam(source, cut, policies.offload, dtypes)


def _warn_of_hooks(made: dict[FSDPParam, nn.Parameter]) -> None:
    """Warn of hooks on gradients of parameters that are replaced."""
    lost = [
        param.name
        for param, original in made.items()
        if hooks_on_gradient(original) or hooks_after_accumulation(original)
    ]
    if lost:
        warnings.warn(
            f"hooks on the gradients of {', '.join(lost)} are lost, because sharded parameters "
            "take the place of these; after fully_shard, call "
            "param.register_post_accumulate_grad_hook(hook), which finds the reduced gradient in "
            "param.grad",
            RuntimeWarning,
            stacklevel=4,
        )


def _by_process_groups(params: Iterable[FSDPParam]) -> Iterable[list[FSDPParam]]:
    """Return the parameters of each set of process groups: those that form a group.

    In the order of the first of each, which all ranks see alike.
    """
    members: dict[tuple[object, ...], list[FSDPParam]] = {}
    for param in params:
        mesh_info = param.mesh_info
        key = (mesh_info.shard_process_group, *mesh_info.process_groups, type(mesh_info))
        members.setdefault(key, []).append(param)
    return members.values()


def _move_buffers(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move buffers to where the model computes, as torch's own does; meta ones stay."""
    for module in modules:
        for sub in module.modules():
            for name, buffer in sub._buffers.items():
                if buffer is not None and buffer.device.type not in ("meta", device.type):
                    sub._buffers[name] = buffer.to(device)
