"""The first use of a root: find the sharded modules under it, name them, check them, agree.

Owns what happens once between the ``fully_shard`` calls and the first gather. Initialisation does
not guess: errors are reported on every rank, before any parameter is gathered.
"""

from __future__ import annotations

import warnings
import weakref
from typing import cast

from torch import nn

from fullshard.sharding.base.compat import hooks_on_gradient
from fullshard.sharding.base.forward_pass import Root
from fullshard.sharding.extension import ROOT_EXTENSIONS
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.agreement import check_agreement
from fullshard.sharding.hooks.context import RootContext
from fullshard.sharding.hooks.lookup import the_states
from fullshard.sharding.hooks.module_state import ModuleState
from fullshard.sharding.hooks.unwritten_buffers import warn_of_unwritten

__all__ = ["initialise_root"]


def initialise_root(root: ModuleState) -> None:
    """Make ``root`` the root of every sharded module under it.

    A module that was a root before, because it ran by itself, is taken over.

    Raises:
        RuntimeError: if such a module is in the middle of a forward or backward, or has a setting
            that only a root may have.
        RankMismatchError: if ranks disagree, or some found an error.
        ValueError: if every rank found the same error: parameters on the meta device, or replaced.
    """
    under = [state for top in root.modules for state in the_states(top, recurse=True)]
    states = list(dict.fromkeys([root, *under]))
    for state in states:
        state.context.end_raised_backward()
        if not state.context.idle:
            raise RuntimeError(
                f"{state.name or 'a module'} under the new root is in the middle of a step; finish "
                "its backward, or call reset_iter_state() on it, before its parent runs forward"
            )
        if state is not root and state.context.finalizes_by_hand:
            raise RuntimeError(
                "set_manual_backward_finalization(True) was called on a "
                f"{type(state.modules[0]).__name__} under the new root; call it on the root, and "
                "with False on the module that has it now"
            )
    names = _name(root, states)
    groups = list(dict.fromkeys(group for state in states for group in state.groups))
    check_agreement(states, root, _find_error(groups))
    context = RootContext(root.device)
    context.adopt(states)
    _join(context)
    for state in states:
        state.join(context, is_root=state is root)
    _warn_of_unmatched(root, groups, names)
    _warn_of_hooks(groups)
    warn_of_unwritten({each: n for top in root.modules for n, each in top.named_modules()})


def _join(context: RootContext) -> None:
    """Let ``context`` share the streams and the queue of other roots with a group of its own.

    [Note: joined roots] Two models with a tied parameter have one group for it, and both roots
    gather and reduce this group. Therefore the roots share one queue of reductions, and either
    backward waits for all of them. With two queues, one root would miss a reduction.
    """
    others = dict[RootContext, None]()
    for group in context.groups:
        found = [each for each in group.roots if not _is_taken_over(each(), context)]
        group.roots = (*found, weakref.ref(context))
        others |= dict.fromkeys(cast(RootContext, r) for each in found if (r := each()) is not None)
    if others:
        first, *rest = others
        for each in (*rest, context):
            each.shared.queue.commit_sealed()
            each.shared = first.shared
            each.use_schedule(each.schedule)  # which gets the queue
            each.share_streams(first.shared.streams)


def _is_taken_over(root: Root | None, context: RootContext) -> bool:
    return root is not None and cast(RootContext, root).states[0] in context.states


def _name(root: ModuleState, states: list[ModuleState]) -> list[str]:
    """Name what is sharded, and return the names of all parameters under ``root``."""
    prefixes = [""] if len(root.modules) == 1 else [f"[{i}]" for i in range(len(root.modules))]
    names: dict[nn.Module, str] = {}
    for prefix, top in zip(prefixes, root.modules, strict=True):
        for name, module in top.named_modules():
            names.setdefault(module, ".".join(filter(None, (prefix, name))))
    for state in states:
        state.name = ", ".join(names[module] for module in state.modules if module in names)
        for group, name in zip(state.own_groups, _group_names(state), strict=True):
            group.rename(name)
            for param in group.params:
                place = param.places[0]
                module_name = names.get(place.module, "?")
                param.name = f"{module_name}.{place.name}" if module_name else place.name
    return [
        f"{name}.{key}" if name else key
        for module, name in names.items()
        for key, _ in module.named_parameters(recurse=False)
    ]


def _warn_of_unmatched(root: ModuleState, groups: list[FSDPParamGroup], names: list[str]) -> None:
    """Warn, on every rank, of what a wire policy names and no parameter under ``root`` is."""
    sent = (group for group in groups if group.mesh_info.shard_world_size > 1)
    unmatched = dict.fromkeys(each for g in sent for each in g.policies.wire.unmatched(names))
    if unmatched:
        warnings.warn(
            f"the wire policy names {', '.join(map(repr, unmatched))}, which matches no parameter "
            f"of {type(root.modules[0]).__name__}; names are as in named_parameters(), such as "
            f"{names[0]!r}; correct the pattern or leave it away",
            stacklevel=2,
        )


def _warn_of_hooks(groups: list[FSDPParamGroup]) -> None:
    """Warn of hooks on sharded parameters, because backward never calls these hooks."""
    found = [param.name for g in groups for param in g.params if hooks_on_gradient(param.sharded)]
    if found:
        warnings.warn(
            f"register_hook() was called on the sharded {', '.join(found)}: backward never calls "
            "such a hook, because it computes the gradients of full parameters; call "
            "param.register_post_accumulate_grad_hook(hook), which finds the reduced gradient in "
            "param.grad",
            RuntimeWarning,
            stacklevel=2,
        )


def _group_names(state: ModuleState) -> list[str]:
    """Return a name for each group of a module, different from each other.

    A group on the module's own mesh has the module's; others add their mesh's axes or its shape.
    """
    found: list[str] = []
    for group in state.own_groups:
        mesh_info, name = group.mesh_info, state.label
        if mesh_info.process_groups != state.mesh_info.process_groups:
            axes = mesh_info.mesh.mesh_dim_names or [str(size) for size in mesh_info.mesh.shape]
            name = f"{name} on {'x'.join(axes)}"
        same = sum(other == name or other.startswith(f"{name} #") for other in found)
        found.append(f"{name} #{same + 1}" if same else name)
    return found


def _find_error(groups: list[FSDPParamGroup]) -> str:
    """Return what this rank finds wrong, or nothing."""
    try:
        for group in groups:
            group.gathering.swap.require_tied()
            group.adopt_registered()
        _check_devices(groups)
        for group in groups:
            group.gathering.setup.prepare()
        for each in ROOT_EXTENSIONS:
            if error := each.at_root(groups):
                raise ValueError(error)
    except ValueError as error:
        return str(error)
    return ""


def _check_devices(groups: list[FSDPParamGroup]) -> None:
    meta = [p.name for group in groups for p in group.params if p.shard.device.type == "meta"]
    if meta:
        raise ValueError(
            f"{', '.join(meta)} are still on the meta device; materialise them before the first "
            "forward: model.to_empty(device=...), then initialise, or load a state dict"
        )
    for group in groups:
        home = group.policies.offload.home(group.device)
        for param in group.params:
            if param.shard.device.type != home.type:
                raise ValueError(
                    f"{param.name} is on {param.shard.device}, but its shard must be on "
                    f"{home.type}; move it with model.to({home.type!r})"
                )
