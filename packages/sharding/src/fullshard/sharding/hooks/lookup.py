"""Finds the states and groups that ``fully_shard`` put on modules."""

from __future__ import annotations

from typing import cast

from torch import nn

from fullshard.sharding.base.checks import require_bool
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.module_state import ATTRIBUTE, ModuleState

__all__ = ["groups_of", "initialised_state", "state_of", "the_root", "the_state", "the_states"]


def the_state(module: object) -> ModuleState:
    """Return the state of a sharded module."""
    state = state_of(cast(nn.Module, module))
    assert state is not None, "fully_shard puts a state on each module whose class it changes"
    return state


def initialised_state(module: object) -> ModuleState:
    """Return the state of a sharded module, whose root is known: itself if none was yet."""
    state = the_state(module)
    state.ensure_initialised()
    return state


def the_root(module: object, call: str) -> ModuleState:
    """Return the state of a sharded module that is a root.

    Raises:
        RuntimeError: if it is none, saying so of ``call``.
    """
    state = initialised_state(module)
    if not state.is_root:
        raise RuntimeError(
            f"{call}() was called on {state.name!r}, which is not the root; call it on the module "
            "whose forward is outermost"
        )
    return state


def the_states(module: object, recurse: bool) -> list[ModuleState]:
    """Return the states of a sharded module and, with ``recurse``, of all below it, each once."""
    require_bool("recurse", recurse)
    modules = cast(nn.Module, module).modules() if recurse else [cast(nn.Module, module)]
    found = (state_of(each) for each in modules)
    return list(dict.fromkeys(state for state in found if state is not None))


def groups_of(module: object, recurse: bool = False) -> list[FSDPParamGroup]:
    """Return the groups of a sharded module's own parameters, or of all ``the_states``."""
    return [group for state in the_states(module, recurse) for group in state.own_groups]


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the state that ``fully_shard`` put on ``module``, or None."""
    state: ModuleState | None = module.__dict__.get(ATTRIBUTE)
    return state
