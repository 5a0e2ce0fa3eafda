"""Views of our sharded modules, under the private names of torch's state.

``FSDPState`` and ``FSDPParamGroupState`` have the attributes that libraries read. Other attributes
raise. A table in ``docs/how-to/libraries.md`` lists the libraries and the names.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from importlib import import_module
from typing import Any, NoReturn

from torch import nn

from fullshard.sharding import FSDPParamGroup, TrainingState
from fullshard.sharding.spi import ModuleState, state_of
from fullshard.wrappers.fsdp1 import FullyShardedDataParallel

__all__ = ["FSDPParamGroupState", "FSDPState", "lazy_init", "of_module", "shown_state"]


class _Shown:
    """A view that raises an explanation for each attribute that it lacks."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} of fullshard has no attribute {name!r}: fullshard serves the "
            "private names that docs/how-to/libraries.md lists; use the public methods of "
            "FSDPModule"
        )


class FSDPParamGroupState(_Shown):
    """A view of a parameter group, for ``state._fsdp_param_group``.

    Attributes:
        mesh_info: the group's mesh.
        device: the device of the group's computation.
    """

    def __init__(self, state: ModuleState, group: FSDPParamGroup) -> None:
        """View ``group``, which belongs to ``state``."""
        self.mesh_info, self.device = group.mesh_info, group.device
        self._state, self._group = state, group

    @property
    def _training_state(self) -> Any:
        """The phase of a step, as a member of torch's ``TrainingState``."""
        theirs = import_module("torch.distributed.fsdp._fully_shard._fsdp_common").TrainingState
        return theirs[self._group.training_state.name]

    @_training_state.setter
    def _training_state(self, value: Enum) -> None:
        """Return all groups to a clean sharded state, if this group is in the middle of a step.

        Raises:
            ValueError: if ``value`` is not IDLE.
        """
        if value.name != TrainingState.IDLE.name:
            raise ValueError(f"got _training_state = {value.name}, expected IDLE")
        if self._group.training_state is not TrainingState.IDLE:
            self._state.context.reset()


class FSDPState(_Shown):
    """A view of a sharded module, for ``_get_module_fsdp_state(module)``."""

    def __init__(self, state: ModuleState) -> None:
        """View ``state``."""
        self._state = state

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroupState]:
        return [FSDPParamGroupState(self._state, group) for group in self._state.own_groups]

    @property
    def _fsdp_param_group(self) -> FSDPParamGroupState | None:
        """The group of the module's own parameters, or None.

        Raises:
            ValueError: if the module has several groups.
        """
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise ValueError(
                f"{self._state.label} has {len(groups)} parameter groups, on meshes of their own; "
                "use _fsdp_param_groups"
            )
        return groups[0] if groups else None

    @property
    def _mp_policy(self) -> object:
        return self._state.settings.casts

    @property
    def _is_root(self) -> bool:
        return self._state.initialised and self._state.is_root


def shown_state(module: nn.Module) -> FSDPState | None:
    """Return a view of ``module``, or None if it is not sharded."""
    state = state_of(module)
    return None if state is None else FSDPState(state)


def of_module(theirs: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Return torch's ``_get_module_fsdp_state``, ``theirs``, extended to our modules."""

    def get_module_fsdp_state(module: nn.Module) -> Any:
        return shown_state(module) or theirs(module)

    return get_module_fsdp_state


def lazy_init(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return FSDP1's ``_lazy_init``, ``theirs``, extended to our wrapper."""

    def initialise(state: Any, root_module: nn.Module) -> Any:
        if not isinstance(state, FullyShardedDataParallel):
            return theirs(state, root_module)
        wrapper: Any = state
        wrapper._is_root = wrapper.check_is_root()
        handles = [each._handle for each in wrapper.fsdp_modules(wrapper)]
        wrapper._all_handles = [handle for handle in handles if handle is not None]
        return wrapper

    return initialise
