"""Full parameters for a block of code: ``with unsharded(module): ...``.

Owns which groups a block opens, that all ranks write back or none does, and that the model is
sharded again however the block ends. How a group's parameters are had is ``full_params``'s affair.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.sharding.access.full_params import FullParams, Mode
from fullshard.sharding.base.checks import require_bool
from fullshard.sharding.groups.param_group import FSDPParamGroup, group_of
from fullshard.sharding.hooks.lookup import state_of, the_states
from fullshard.sharding.hooks.module_state import ModuleState
from fullshard.sharding.params.sources import has_hooks

__all__ = ["in_block", "on_any_rank", "opened", "unsharded"]


_opened: weakref.WeakKeyDictionary[FSDPParamGroup, FullParams] = weakref.WeakKeyDictionary()


@contextmanager
def unsharded(
    module: nn.Module,
    *,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    recurse: bool = True,
) -> Iterator[None]:
    """Gives ``module`` full parameters inside a ``with`` block, and shards again after it.

    For evaluation and generation (a forward inside gathers nothing), for looking at parameters,
    and, with ``writeback``, for changing them. Every rank enters and leaves the block. On the
    device, parameters are those that forward uses: in the ``param_dtype`` of a mixed precision
    policy. On the CPU they are full copies in the dtype in which they are stored, which belong to
    you (a ``state_dict()`` of them, say) and which no forward uses. Both are plain tensors; with
    tensor parallelism those on the device are still sharded over its axis.

    Tensors on the device are freed at the end of the block: keep a clone of what you need.

    Args:
        module: a sharded module, or any that holds sharded parameters or modules; a module without
            any is left as it is.
        writeback: write what was changed into the shards when the block ends. If it raises, on any
            rank, nothing is written on any. Without it, changes are lost. Where ``param_dtype`` is
            not the stored dtype, elements that did not change keep their stored value.
        rank0_only: only the first rank of the mesh gets full parameters, and only it may call
            ``module``, without gradients; with ``writeback`` its values go to all ranks. With
            tensor parallelism that is one for each rank of its axis, and they change what is whole
            on all of them alike.
        offload_to_cpu: hand out copies on the CPU.
        recurse: also for the modules below; else the module's own group only.

    Raises:
        TypeError: if ``module`` is no module, or another argument is not a bool.
        RuntimeError: on entry, inside a forward or backward of the module, or inside another block
            for the same parameters unless both are without ``rank0_only`` and ``offload_to_cpu``
            (then the outermost writes back for both); at the end, if what was changed
            cannot be written back.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; pass an nn.Module")
    for name, value in (
        ("writeback", writeback),
        ("rank0_only", rank0_only),
        ("offload_to_cpu", offload_to_cpu),
        ("recurse", recurse),
    ):
        require_bool(name, value)
    mode = Mode(
        writeback=writeback,
        rank0_only=rank0_only,
        copied=offload_to_cpu,
        on_cpu=offload_to_cpu,
    )
    with opened(module, mode, recurse=recurse):
        yield


@contextmanager
def opened(module: nn.Module, mode: Mode, *, recurse: bool) -> Iterator[None]:
    """Does what ``unsharded`` does, in any mode."""
    block = _Block(module, mode, recurse)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not mode.rank0_only):
        try:
            block.enter()
            yield
        except BaseException as error:
            block.leave(error)
            raise
        block.leave(None)


def in_block(group: FSDPParamGroup) -> bool:
    """Tells whether a ``with unsharded(...)`` block has the full parameters of ``group``."""
    return group in _opened


class _Block:
    """One ``with`` statement."""

    def __init__(self, module: nn.Module, mode: Mode, recurse: bool) -> None:
        """Finds the groups and checks that they are free to be opened; changes nothing."""
        self._mode = mode
        self._states = the_states(module, recurse)
        for state in self._states:
            state.ensure_initialised()
        groups = _groups_of(module, self._states, recurse)
        _require_quiet(self._states, groups)
        self._inner = [_opened[group] for group in groups if group in _opened]
        for other in self._inner:
            if not (mode.ordinary and other.mode.ordinary):
                raise RuntimeError(
                    f"parameter group {other.group.name!r} is inside another unsharded() "
                    "block; blocks with rank0_only or offload_to_cpu cannot be nested: leave one "
                    "before entering the other"
                )
        if mode.writeback and not mode.copied:
            _require_no_hooks(groups)
        self._own = [mode.open(group) for group in groups if group not in _opened]
        self._hooks: list[RemovableHandle] = []
        self._unrecorded = ExitStack()

    def enter(self) -> None:
        """Gets the parameters."""
        for other in self._inner:
            other.writeback |= self._mode.writeback
        for full in self._own:
            _opened[full.group] = full
        if self._mode.rank0_only:
            for context in {state.context for state in self._states}:
                self._unrecorded.enter_context(context.unrecorded())
        one_by_one = not self._mode.ordinary  # else all are whole at once, wanted or not
        for full in self._own:
            full.launch()
            if one_by_one:
                full.finish()
        for full in self._own:
            if not one_by_one:
                full.finish()
        refused = [full for full in self._own if self._mode.copied or not full.holds]
        self._hooks = [
            module.register_forward_pre_hook(_refuse_forward, prepend=True)
            for module in _modules_of(self._states, refused)
        ]

    def leave(self, error: BaseException | None) -> None:
        """Writes back where asked for, and shards again.

        Raises:
            RuntimeError: if nothing was written, and ``error`` does not say why.
        """
        if error is not None and self._mode.writeback:
            for other in self._inner:
                other.failed = True
        try:
            problem = self._write_back(error)
        finally:
            self._release()
        if problem and error is None:
            raise RuntimeError(problem)

    def _write_back(self, error: BaseException | None) -> str:
        """Writes back, unless there is a problem on any rank; returns what it is."""
        changed = [each for each in self._own if each.writeback]
        if not changed or (error is not None and not isinstance(error, Exception)):
            return ""  # the process is being ended, and must not wait for others
        problem = "a block that writes back raised" if error is not None else ""
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

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for full in self._own:
            full.release()
            _opened.pop(full.group, None)
        self._unrecorded.close()


def _groups_of(
    module: nn.Module, states: Iterable[ModuleState], recurse: bool
) -> list[FSDPParamGroup]:
    """Returns the groups of the sharded modules, and those that hold a parameter of ``module``."""
    groups = {group: None for state in states for group in state.groups}
    for param in module.parameters(recurse=recurse):
        group = group_of(param)
        if group is not None:
            groups[group] = None
    return list(groups)


def _require_quiet(states: Iterable[ModuleState], groups: Iterable[FSDPParamGroup]) -> None:
    busy = [state.label for state in states if not state.context.quiet]
    busy += [repr(group.name) for group in groups if group.leases.in_use]
    if busy:
        raise RuntimeError(
            f"unsharded() was entered while {busy[0]} is in the middle of a forward or backward; "
            "enter it between steps (after a step that raised, call reset_iter_state() first)"
        )


def _require_no_hooks(groups: Iterable[FSDPParamGroup]) -> None:
    hooked = [p.name for group in groups for p in group.params if has_hooks(p.name, p.shard)]
    if hooked:
        raise RuntimeError(
            f"unsharded(writeback=True) cannot write back {', '.join(hooked)}: what "
            "fsdp_post_all_gather makes of a parameter has no way back to what is stored; open a "
            "module without such parameters, or pass offload_to_cpu=True, which copies what is "
            "stored"
        )


def _modules_of(states: Iterable[ModuleState], refused: Iterable[FullParams]) -> list[nn.Module]:
    """Returns the modules whose forward needs parameters of which this rank has no full ones."""
    groups = {full.group for full in refused}
    return list(
        dict.fromkeys(
            module
            for state in states
            if not groups.isdisjoint(state.groups)
            for module in state.modules
        )
    )


def _refuse_forward(module: nn.Module, args: object) -> NoReturn:
    state = state_of(module)
    raise RuntimeError(
        f"forward of {state.label if state else type(module).__name__} was called inside "
        "unsharded(), where this rank has no full parameters for it: with rank0_only only the "
        "first rank may, and with offload_to_cpu none; leave out these arguments, or leave the "
        "block first"
    )


def on_any_rank(mine: bool, groups: Iterable[FSDPParamGroup]) -> bool:
    """Returns whether ``mine`` holds on any of the ranks that share these groups."""
    found: dict[dist.ProcessGroup, torch.device] = {}
    for group in groups:
        for process_group in group.mesh_info.process_groups:
            found.setdefault(process_group, group.device)
    flag = int(mine)
    for process_group, device in found.items():
        told = torch.tensor(flag, device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=process_group)
        flag = int(told.item())
    return bool(flag)
