"""The methods that a sharded module gains: ``FSDPModule``, under torch's names.

Owns the class that ``fully_shard`` mixes into a module's own. Its settings are in ``comm_settings``
(how bytes move) and ``step_settings`` (what a step does). A method passes the call to the module's
state; none of these communicates but ``unshard``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import nn

from fullshard.sharding.api.comm_settings import CommSettings
from fullshard.sharding.api.handles import UnshardHandle
from fullshard.sharding.api.step_settings import StepSettings, states_of
from fullshard.sharding.base.checks import require_bool
from fullshard.sharding.base.compat import untraced
from fullshard.sharding.hooks.lookup import (
    groups_of,
    initialised_state,
    the_root,
    the_state,
    the_states,
)
from fullshard.sharding.hooks.unwritten_buffers import note_materialised
from fullshard.sharding.params.lookup import owner_of

__all__ = [
    "FSDPModule",
    "mixed_class_of",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


if TYPE_CHECKING:
    _Original = nn.Module  # what it is mixed into: typed, not in its bases
else:
    _Original = object


@untraced
class FSDPModule(CommSettings, StepSettings, _Original):
    """A module whose parameters are sharded. Made by ``fully_shard``, never constructed."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build an ordinary instance of the original class.

        Containers build new ones of their own class when sliced; a slice is not sharded by itself.
        """
        original: type = cls.__bases__[1]
        return original(*args, **kwargs)

    # -- parameters -------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the full parameters of this module's own group, ahead of use or to look at them.

        Not recursive. Follows the mixed precision policy. The forward or backward that uses the
        group next reshards it as it would what it gathered itself; else ``reshard()`` does, or the
        end of a backward. ``unsharded(module)`` holds parameters through whole steps.

        Args:
            async_op: return at once, with a handle to wait on.

        Returns:
            A handle if ``async_op``, or None.

        Raises:
            TypeError: if ``async_op`` is not a bool.
        """
        require_bool("async_op", async_op)
        state = initialised_state(self)
        state.unshard(async_op=async_op)
        return UnshardHandle(state.wait_for_unshard) if async_op else None

    def reshard(self) -> None:
        """Free the full parameters of this module's own group, and register the sharded ones.

        A group in the middle of its forward or backward is freed when that ends. Backward gathers
        again.
        """
        state = the_state(self)
        state.reshard_now()
        for group in state.own_groups:
            group.gathering.drop_full()

    def parameters_changed(self, *, recurse: bool = True) -> None:
        """Report that parameters were changed by other means than an optimizer or a state dict.

        Copies that were left unsharded are gathered again at their next use. Call it on every rank.

        Args:
            recurse: also those of all sharded modules below.

        Raises:
            TypeError: if ``recurse`` is not a bool.
        """
        for state in the_states(self, recurse):
            for group in state.groups:
                group.generation.advance()

    # -- gradients --------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Turn the reduction of gradients on or off: off accumulates without communication.

        Args:
            requires_gradient_sync: whether backward reduces gradients.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
        """
        require_bool("requires_gradient_sync", requires_gradient_sync)
        for group in groups_of(self, recurse):
            group.gradients.synchronises = requires_gradient_sync
            group.gradients.setups.strategy.synchronise(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Turn the all-reduce over replicas on or off, on a 2-D mesh.

        Off, gradients are reduced over shards only and kept for the next backward with it on.

        Args:
            requires_all_reduce: whether backward all-reduces gradients.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
        """
        require_bool("requires_all_reduce", requires_all_reduce)
        for group in groups_of(self, recurse):
            group.gradients.setups.strategy.synchronise(requires_all_reduce)

    # -- errors -----------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Bring everything below this root back to a clean sharded state, after an error.

        Call it on every rank. Waits for what is in flight. Sharded gradients of backwards that
        ended stay, with what the failed one added to them. The rest is dropped. A warning names
        gradients of earlier backwards that were accumulated without communication, as these are
        dropped, too.

        Raises:
            RuntimeError: if this module is not the root.
        """
        if the_state(self).initialised:  # else there was no iteration
            the_root(self, "reset_iter_state").context.reset()

    # -- torch's own hooks ------------------------------------------------------------------------

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Do what ``to``, ``to_empty`` and the like do, to the sharded parameters."""
        state = the_state(self)
        for group in state.groups:  # also those of tied parameters
            group.reshard()
        with note_materialised(self):
            result = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's
        for group in state.groups:
            group.adopt_registered()
            group.generation.advance()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this module's parameters, also while they are unsharded.

        Other modules of the same list keep theirs.
        """
        super().zero_grad(set_to_none)
        for param in self.parameters():
            owner = owner_of(param)
            if owner is not None:
                owner.zero_gradient(set_to_none)

    # -- copies: it holds process groups and hooks, which no copy could have ----------------------

    def __copy__(self) -> Any:
        """Return a shallow copy, as of any module: a second module that shares all attributes."""
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
    """Return ``FSDP<Original>`` for ``FSDPModule``: it first, then the original; made once."""
    key = (mixin, original)
    if key not in _classes:
        name = mixin.__name__.removesuffix("Module") + original.__name__
        _classes[key] = type(name, (mixin, original), {"__module__": original.__module__})
    return _classes[key]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a sharded module unshard and reshard as ``forward`` does.

    A module that is not sharded does not change, so that the code also runs without sharding.

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
        try:
            args, kwargs = state.pre_forward(cast(nn.Module, module), args, kwargs)
            output = method(*args, **kwargs)
        except BaseException:
            state.post_forward(cast(nn.Module, module), args, None)
            raise
        return state.post_forward(cast(nn.Module, module), args, output)

    wrapped.__name__, wrapped.__doc__ = method_name, method.__doc__
    setattr(module, method_name, wrapped)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Make several roots run on the streams of the first: the stages of a pipeline, say.

    Raises:
        TypeError: if one of ``modules`` is not sharded.
    """
    states = states_of(modules)
    for state in states:
        state.ensure_initialised()
        state.context.share_streams(states[0].context.shared.streams)
