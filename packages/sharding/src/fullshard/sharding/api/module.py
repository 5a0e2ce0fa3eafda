"""The methods that a sharded module gains: ``FSDPModule``, under torch's names.

Owns the class that ``fully_shard`` mixes into a module's own, and the checks of the setters'
arguments. Each method hands over to the module's state; none communicates but ``unshard``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from fullshard.sharding.api.comm_settings import CommSettings
from fullshard.sharding.api.statistics import ShardingStatistics, statistics_of
from fullshard.sharding.base.checks import require_bool
from fullshard.sharding.hooks.context import RootContext
from fullshard.sharding.hooks.lookup import (
    groups_of,
    initialised_state,
    the_root,
    the_state,
    the_states,
)
from fullshard.sharding.hooks.module_state import ModuleState
from fullshard.sharding.protocols import FixedReshard

__all__ = [
    "FSDPModule",
    "GradientReductionHandle",
    "UnshardHandle",
    "mixed_class_of",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns: wait on it before using the full parameters.

    A forward of the module waits by itself.
    """

    def __init__(self, state: ModuleState | None = None) -> None:
        """Wraps the module's state; without one, there is nothing to wait for."""
        self._state = state

    def wait(self) -> None:
        """Returns once the module's full parameters may be used; any number of calls is fine."""
        if self._state is not None:
            self._state.wait_for_unshard()
            self._state = None


class GradientReductionHandle:
    """The reductions that ``finalize_backward(async_op=True)`` launched."""

    def __init__(self, context: RootContext) -> None:
        """Wrap the root's state."""
        self._context: RootContext | None = context

    def wait(self) -> None:
        """Wait for the reductions and set the gradients; further calls do nothing.

        Call it before the gradients are used and before the next forward.
        """
        if self._context is not None:
            self._context.commit()
            self._context = None


if TYPE_CHECKING:
    _Original = nn.Module  # what it is mixed into: typed, not in its bases
else:
    _Original = object


class FSDPModule(CommSettings, _Original):
    """A module whose parameters are sharded. Made by ``fully_shard``, never constructed."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Builds an ordinary instance of the original class.

        Containers build new ones of their own class when sliced; a slice is not sharded by itself.
        """
        original: type = cls.__bases__[1]
        return original(*args, **kwargs)

    # -- parameters -------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the full parameters of this module's own group, ahead of use or to look at them.

        Not recursive. Follows the mixed precision policy. The forward or backward that uses the
        group next reshards it as it would what it gathered itself; else ``reshard()`` does, or the
        end of a backward. ``unsharded(module)`` holds parameters through whole steps.

        Args:
            async_op: return at once, with a handle to wait on.

        Returns:
            A handle if ``async_op``, else None.

        Raises:
            TypeError: if ``async_op`` is not a bool.
        """
        require_bool("async_op", async_op)
        state = initialised_state(self)
        state.unshard(async_op=async_op)
        return UnshardHandle(state) if async_op else None

    def reshard(self) -> None:
        """Frees the full parameters of this module's own group, and registers the sharded ones.

        A group in the middle of its forward or backward is freed when that ends. Backward gathers
        again.
        """
        the_state(self).reshard_now()

    def parameters_changed(self, *, recurse: bool = True) -> None:
        """Says that parameters were changed by other means than an optimizer or a state dict.

        Copies that were left unsharded are gathered anew at their next use. Call it on every rank.

        Args:
            recurse: also those of all sharded modules below.

        Raises:
            TypeError: if ``recurse`` is not a bool.
        """
        for state in the_states(self, recurse):
            state.parameters_changed()

    # -- gradients --------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Turns the reduction of gradients on or off: off accumulates without communication.

        Args:
            requires_gradient_sync: whether backward reduces gradients.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
        """
        require_bool("requires_gradient_sync", requires_gradient_sync)
        for group in groups_of(self, recurse):
            group.gradients.accumulation.enabled = requires_gradient_sync
            group.gradients.replicas.synchronise(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Turns the all-reduce over replicas on or off, on a 2-D mesh.

        Off, gradients are reduced over shards only and kept for the next backward with it on.

        Args:
            requires_all_reduce: whether backward all-reduces gradients.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
        """
        require_bool("requires_all_reduce", requires_all_reduce)
        for group in groups_of(self, recurse):
            group.gradients.replicas.synchronise(requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Says whether the next backward is the last one before the gradients are used.

        If not, its end does not wait for reductions; their gradients appear with the last.

        Raises:
            TypeError: if ``is_last_backward`` is not a bool.
        """
        require_bool("is_last_backward", is_last_backward)
        initialised_state(self).context.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Choose who finishes the backward of all groups under this root.

        By default each backward does at its end: it reduces gradients that no module's own backward
        reduced, and reshards. With ``enabled`` nothing is finished until ``finalize_backward()``:
        groups that a backward left unsharded stay unsharded, and gradients stay on the unsharded
        parameters. Pipeline schedules need this. Set it before the forward.

        Raises:
            TypeError: if ``enabled`` is not a bool.
            RuntimeError: in the middle of a forward or backward.
        """
        require_bool("enabled", enabled)
        context = initialised_state(self).context
        if not context.quiet:
            raise RuntimeError(
                "set_manual_backward_finalization() was called in the middle of a forward or "
                "backward; call it between steps"
            )
        context.finalizes_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Finish the backward of all groups under this root, after the last backward of a step.

        Reduces the gradients that were accumulated, if synchronisation is on, and reshards, as
        ``set_reshard_after_backward`` says. Call it on every rank.

        Args:
            async_op: return before the reductions are over.

        Returns:
            A handle to wait on if ``async_op``, else None.

        Raises:
            TypeError: if ``async_op`` is not a bool.
            RuntimeError: without ``set_manual_backward_finalization(True)``, or in the middle of a
                forward or backward.
        """
        require_bool("async_op", async_op)
        context = initialised_state(self).context
        if not context.finalizes_by_hand:
            raise RuntimeError(
                "finalize_backward() was called, but each backward finishes by itself; call "
                "set_manual_backward_finalization(True) before the forward"
            )
        context.finalize_backward()
        handle = GradientReductionHandle(context)
        if async_op:
            return handle
        handle.wait()
        return None

    # -- resharding and prefetch ------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Changes ``reshard_after_forward``, also for the root if it is this module.

        Args:
            reshard_after_forward: whether to free full parameters after forward.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
        """
        require_bool("reshard_after_forward", reshard_after_forward)
        for state in the_states(self, recurse):
            state.after_forward = FixedReshard(forward=reshard_after_forward).after_forward
            state.be_root(state.is_root)
            for group in state.own_groups:
                group.reshard_to(None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Changes whether full parameters are freed after backward.

        Kept ones serve the next forward, unless the parameters change before it.

        Args:
            reshard_after_backward: whether to free full parameters after backward.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
        """
        require_bool("reshard_after_backward", reshard_after_backward)
        for state in the_states(self, recurse):
            state.after_backward = FixedReshard(backward=reshard_after_backward).after_backward
            state.be_root(state.is_root)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Says whether backward needs this module's full parameters: an embedding's does not.

        Not recursive.

        Raises:
            TypeError: if ``unshard_in_backward`` is not a bool.
        """
        require_bool("unshard_in_backward", unshard_in_backward)
        the_state(self).unshard_in_backward = unshard_in_backward

    def set_gather_on_read(self, gather_on_read: bool, *, recurse: bool = True) -> None:
        """Let backward enter a module through any tensor, not only through what forward returned.

        For losses on tensors that a module keeps or that a forward hook stores: perceptual losses,
        distillation, probes. Backward then gathers a group when autograd first reads one of its
        parameters. Without it such a backward raises torch's "modified by an inplace operation ...
        is at version 1000000000", and in debug mode an error that names the parameter. Each tensor
        that autograd saves costs two calls of Python. Regions with other hooks on saved tensors
        (checkpointing, ``save_on_cpu``) keep those.

        Args:
            gather_on_read: whether a read of a saved parameter gathers its group.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
        """
        require_bool("gather_on_read", gather_on_read)
        for state in the_states(self, recurse):
            state.gathers_on_read = gather_on_read

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the next forward's gathers wait for ``event`` instead of all work issued so far.

        Record it after the optimizer's step, on the root; it serves once.

        Raises:
            TypeError: if ``event`` is no event.
        """
        if not (hasattr(event, "wait") and hasattr(event, "record")):
            raise TypeError(
                f"event is a {type(event).__name__}; pass a torch.Event that was recorded after "
                "optimizer.step()"
            )
        initialised_state(self).context.post_optim_event = event

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gathers ``modules`` ahead, in this order, after this module's own gather in forward.

        Raises:
            TypeError: if one of them is not sharded.
        """
        the_state(self).forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gathers ``modules`` ahead, in this order, after this module's own gather in backward.

        Replaces the default, the module before this one in forward order.

        Raises:
            TypeError: if one of them is not sharded.
        """
        the_state(self).backward_prefetch = _states_of(modules)

    # -- statistics -------------------------------------------------------------------------------

    def statistics(self) -> ShardingStatistics:
        """Returns what this module and those below amount to; print it for a table.

        Parameters, bytes sharded, gathered and padded; collectives and host time per step since the
        model was built, or since ``reset_statistics()``.
        """
        steps = initialised_state(self).context.steps
        return statistics_of(the_states(self, recurse=True), steps)

    def reset_statistics(self) -> None:
        """Starts counting anew, for this root and all below it: call it after the warm-up."""
        initialised_state(self).context.reset_statistics()

    # -- errors -----------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Brings everything below this root back to a clean sharded state, after an error.

        Call it on every rank. Waits for what is in flight. Sharded gradients of backwards that
        ended stay; what the failed one left is dropped, and with it, with a warning, gradients that
        earlier ones accumulated without communication: see ``set_keep_unsynced_gradients``.

        Raises:
            RuntimeError: if this module is not the root.
        """
        if the_state(self).initialised:  # else there was no iteration
            the_root(self, "reset_iter_state").context.reset()

    # -- torch's own hooks ------------------------------------------------------------------------

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Does what ``to``, ``to_empty`` and the like do, to the sharded parameters."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        for group in groups_of(self):
            group.adopt_registered()
        the_state(self).parameters_changed()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters, also of those that are unsharded now."""
        super().zero_grad(set_to_none)
        for group in groups_of(self, recurse=True):
            for param in group.params:
                param.zero_gradient(set_to_none)

    # -- copies: it holds process groups and hooks, which no copy could have ----------------------

    def __copy__(self) -> Any:
        """Returns what ``copy.copy`` gives of any module: one beside it that shares all it has."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuses.

        Raises:
            TypeError: always, saying what to do instead.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be deep-copied: the copy would share process groups and "
            "hooks with the original; build a second model, fully_shard it, and load this one's "
            "state_dict()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuses to be pickled, by ``torch.save(model)`` say.

        Raises:
            TypeError: always, saying what to do instead.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: it holds process groups and hooks; save its "
            "state_dict() with torch.distributed.checkpoint, or full_state_dict(model) with "
            "torch.save, and load that into a model that was built and sharded anew"
        )


_classes: dict[tuple[type, type], type] = {}


def mixed_class_of(mixin: type[FSDPModule], original: type) -> type:
    """Returns ``FSDP<Original>`` for ``FSDPModule``: it first, then the original; made once."""
    key = (mixin, original)
    if key not in _classes:
        name = mixin.__name__.removesuffix("Module") + original.__name__
        _classes[key] = type(name, (mixin, original), {"__module__": original.__module__})
    return _classes[key]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a sharded module unshard and reshard as ``forward`` does.

    A module that is not sharded is left as it is, so that the same code runs without sharding.

    Raises:
        TypeError: if ``method_name`` is not a string.
        ValueError: if the module has no such method.
    """
    if not isinstance(method_name, str):
        raise TypeError(f"method_name is a {type(method_name).__name__}; pass the method's name")
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    state = the_state(module)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = state.pre_forward(cast(nn.Module, module), args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            state.post_forward(cast(nn.Module, module), args, None)
            raise
        return state.post_forward(cast(nn.Module, module), args, output)

    wrapped.__name__, wrapped.__doc__ = method_name, method.__doc__
    setattr(module, method_name, wrapped)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Makes several roots run on the streams of the first: the stages of a pipeline, say.

    Raises:
        TypeError: if one of ``modules`` is not sharded.
    """
    states = _states_of(modules)
    for state in states:
        state.ensure_initialised()
        state.context.share_streams(states[0].context.shared.streams)


def _states_of(modules: Sequence[object]) -> list[ModuleState]:
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"modules is a {type(modules).__name__}; pass a list of sharded modules")
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise TypeError(
                f"modules holds a {type(module).__name__}, which is not sharded; call fully_shard "
                "on it first"
            )
    return [the_state(module) for module in modules]
