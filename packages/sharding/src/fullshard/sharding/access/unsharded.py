"""Full parameters for a block of code: ``with unsharded(module): ...``.

Owns which groups a block opens, that all ranks write back or none does, and that the model is
sharded again however the block ends. How a group's parameters are had is ``full_params``'s affair.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import torch
from torch import nn

from fullshard.comm.spi import IDLE
from fullshard.sharding.access.full_params import FullParams, Mode
from fullshard.sharding.access.state_dict import require_between_steps
from fullshard.sharding.base.checks import require_bool
from fullshard.sharding.base.compat import untraced
from fullshard.sharding.base.exchange import numbers_of_ranks
from fullshard.sharding.extension import ROOT_EXTENSIONS
from fullshard.sharding.groups.param_group import FSDPParamGroup, group_of
from fullshard.sharding.hooks.lookup import state_of, the_states
from fullshard.sharding.hooks.module_state import ModuleState
from fullshard.sharding.params.param_sharding import has_hooks

__all__ = ["in_block", "on_any_rank", "opened", "unsharded"]


_opened: weakref.WeakKeyDictionary[FSDPParamGroup, FullParams] = weakref.WeakKeyDictionary()


@contextmanager
@untraced
def unsharded(
    module: nn.Module,
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    recurse: bool = True,
) -> Iterator[None]:
    """Give ``module`` full parameters inside a ``with`` block, and shards again after it.

    For evaluation and generation (a forward inside gathers nothing), for looking at parameters,
    and, with ``writeback``, for changing them. Every rank enters and leaves the block. On the
    device, parameters are those that forward uses: in the ``param_dtype`` of a mixed precision
    policy. The copies on the CPU are full, have the stored dtype, and belong to you (a
    ``state_dict()`` of them, say). No forward uses these copies. The parameters are plain tensors
    in both places; with tensor parallelism those on the device are still sharded over its axis.

    Tensors on the device are freed at the end of the block: keep a clone of what you need. Autograd
    refuses the backward of a forward from before a change in place, as without sharding.

    Args:
        module: a sharded module, or any that holds sharded parameters or modules; a module without
            any is left as it is.
        writeback: write what was changed into the shards when the block ends. If it raises, on any
            rank, nothing is written on any. Without it, changes are lost. Unchanged elements keep
            their stored value if ``param_dtype`` is another dtype.
        rank0_only: only the first rank of the mesh gets full parameters, and only it may call
            ``module``, without gradients; with ``writeback`` its values go to all ranks. With
            tensor parallelism there is one such rank for each rank of its axis. These ranks must
            make equal changes to tensors that tensor parallelism does not cut.
        offload_to_cpu: return copies on the CPU.
        recurse: also for the modules below; else the module's own group only.

    Raises:
        TypeError: if ``module`` is no module, or another argument is not a bool.
        RuntimeError: on entry, inside a forward or backward of the module, or inside another block
            for these parameters, unless both blocks are without ``rank0_only`` and
            ``offload_to_cpu`` (then the outermost block writes back), or if an offload policy could
            not read a shard on some rank; at the end, if what was changed cannot be written back.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; pass an nn.Module")
    require_bool("writeback", writeback)
    require_bool("rank0_only", rank0_only)
    require_bool("offload_to_cpu", offload_to_cpu)
    mode = Mode(
        writeback=writeback, rank0_only=rank0_only, copied=offload_to_cpu, on_cpu=offload_to_cpu
    )
    with opened(module, mode, recurse=recurse):
        yield


@contextmanager
@untraced
def opened(module: nn.Module, mode: Mode, *, recurse: bool) -> Iterator[None]:
    """Do what ``unsharded`` does, in any mode."""
    states = the_states(module, recurse)
    for state in states:
        state.ensure_initialised()
    groups = _groups_of(module, states, recurse)
    _require_openable(states, groups, mode)
    inner = [_opened[group] for group in groups if group in _opened]
    own = [mode.open(group) for group in groups if group not in _opened]
    for other in inner:
        other.writeback |= mode.writeback
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled() and not mode.rank0_only))
        for context in {state.context for state in states} if mode.rank0_only else ():
            stack.enter_context(context.unrecorded())
        stack.callback(_release, own)
        _opened.update((full.group, full) for full in own)
        try:
            for full in own:
                full.launch()
            for full in own:
                full.finish()
            for each in ROOT_EXTENSIONS:
                each.at_block([full.group for full in own])
            for refusing in _modules_of(states, own):
                hook = refusing.register_forward_pre_hook(_refuse_forward, prepend=True)
                stack.callback(hook.remove)
            yield
        except BaseException as error:
            for other in inner if mode.writeback else ():
                other.failed = True
            if isinstance(error, Exception):  # else the process ends, and must not wait for others
                _write_back(own, "a block that writes back raised")
            raise
        problem = _write_back(own, "")
    if problem:
        raise RuntimeError(problem)


def in_block(group: FSDPParamGroup) -> bool:
    """Return whether a ``with unsharded(...)`` block has the full parameters of ``group``."""
    return group in _opened


def _write_back(own: Sequence[FullParams], problem: str) -> str:
    """Write back where asked for, unless there is a problem on any rank; return what it is."""
    changed = [each for each in own if each.writeback]
    for each in changed:
        failed = "an unsharded() block inside this one raised, so nothing is written back"
        problem = problem or (failed if each.failed else each.problem())
    if on_any_rank(bool(problem), [each.group for each in changed]):
        return problem or (
            "nothing was written back on any rank, as another rank raised inside unsharded()"
        )
    with torch.no_grad():
        for each in changed:
            each.write_back()
            each.group.generation.advance()
    return ""


def _release(own: Sequence[FullParams]) -> None:
    for full in own:
        full.release()
        _opened.pop(full.group, None)
    for give_back in IDLE:
        give_back()


def _groups_of(
    module: nn.Module, states: Iterable[ModuleState], recurse: bool
) -> list[FSDPParamGroup]:
    """Return the groups of the sharded modules, and those that hold a parameter of ``module``."""
    owners = map(group_of, module.parameters(recurse=recurse))
    own = [group for state in states for group in state.groups]
    return list(dict.fromkeys([*own, *(group for group in owners if group is not None)]))


def _require_openable(
    states: Iterable[ModuleState], groups: Iterable[FSDPParamGroup], mode: Mode
) -> None:
    """Return if a block may open ``groups``; end a backward that raised.

    Raises:
        RuntimeError: if one is in use, another block excludes this one, or it could not write back.
    """
    for state in states:
        state.context.require_quiet("unsharded")
    for group in groups:
        require_between_steps(group, "unsharded()")
        if group in _opened and not (mode.ordinary and _opened[group].mode.ordinary):
            raise RuntimeError(
                f"parameter group {group.name!r} is inside another unsharded() block; blocks with "
                "rank0_only or offload_to_cpu cannot be nested: leave one before entering the other"
            )
    hooked = [p.name for group in groups for p in group.params if has_hooks(p.name, p.shard)]
    if hooked and mode.writeback and not mode.copied:
        raise RuntimeError(
            f"unsharded(writeback=True) cannot write back {', '.join(hooked)}: what "
            "fsdp_post_all_gather makes of a parameter has no way back to what is stored; open a "
            "module without such parameters, or pass offload_to_cpu=True, which copies what is "
            "stored"
        )


def _modules_of(states: Iterable[ModuleState], own: Iterable[FullParams]) -> set[nn.Module]:
    """Return the modules whose forward needs parameters of which this rank has no full ones."""
    refused = {full.group for full in own if full.mode.copied or not full.holds}
    refusing = [state for state in states if not refused.isdisjoint(state.groups)]
    return {module for state in refusing for module in state.modules}


def _refuse_forward(module: nn.Module, args: object) -> NoReturn:
    state = state_of(module)
    raise RuntimeError(
        f"forward of {state.label if state else type(module).__name__} was called inside "
        "unsharded(), where this rank has no full parameters for it: with rank0_only only the "
        "first rank may, and with offload_to_cpu none; leave out these arguments, or leave the "
        "block first"
    )


def on_any_rank(mine: bool, groups: Iterable[FSDPParamGroup]) -> bool:
    """Return whether ``mine`` holds on any of the ranks that share these groups."""
    found = {each: group for group in groups for each in group.mesh_info.process_groups}
    flag = int(mine)
    for process_group, group in found.items():
        plug_in = group.gathering.config.comm
        flag = max(numbers_of_ranks(flag, process_group, group.device, plug_in))
    return bool(flag)
