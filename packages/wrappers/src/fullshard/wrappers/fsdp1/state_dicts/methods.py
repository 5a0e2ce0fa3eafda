"""Set the kind of state dict of a wrapped model: FSDP1's static methods.

Owns their names and arguments, and finding the instances that they speak of.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from fullshard.wrappers.fsdp1.instance import Instance
from fullshard.wrappers.fsdp1.state_dicts.types import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    get_settings,
    set_settings,
    settings_of,
    settings_within,
)

__all__ = ["StateDictMethods"]


class StateDictMethods:
    """FSDP1's static methods about kinds of state dict.

    Attributes:
        instance: what a wrapper, which is one of these, knows of itself.
    """

    instance: Instance

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set options of the instances under ``module``, and return the earlier options.

        Args:
            module: an instance, or a module that holds some.
            state_dict_type: what ``state_dict()`` is to hold.
            state_dict_config: how; None: the default of that kind.
            optim_state_dict_config: how ``optim_state_dict()``; None: the default of that kind.

        Raises:
            TypeError: if ``state_dict_type`` is none.
            RuntimeError: if a configuration is that of another kind, or instances differ.
            ValueError: if there is no instance.
        """
        settings = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        return set_settings(_instances(module), module, settings)

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return what the instances under ``module`` are set to.

        Raises:
            RuntimeError: if they differ.
            ValueError: if there is none.
        """
        return get_settings(_instances(module), module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """Do what ``set_state_dict_type`` does, for a ``with`` block."""
        settings = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        return settings_within(_instances(module), module, settings)


def _instances(module: nn.Module) -> list[Instance]:
    return [each.instance for each in module.modules() if isinstance(each, StateDictMethods)]
