"""The kinds of FSDP1 state dict, and the kind that each module has.

Owns the enum, the configurations with torch's names, fields and defaults, and what a module is set
to. ``hooks`` implements the kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from torch import nn

from fullshard.checkpoint import (
    OptimStateKind,
    OptimStateOptions,
    set_optim_state_options,
)
from fullshard.sharding import (
    converted,
)
from fullshard.wrappers.fsdp1.settings import require_kind

__all__ = [
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "HasSettings",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "get_settings",
    "set_settings",
    "settings_of",
    "settings_within",
]


class StateDictType(Enum):
    """Kind of a wrapped model's ``state_dict()``."""

    FULL_STATE_DICT = auto()
    """Whole, plain tensors: what the unwrapped model has."""
    LOCAL_STATE_DICT = auto()
    """The shards themselves, as ``DTensor``s: a later step changes them, as in torch."""
    SHARDED_STATE_DICT = auto()
    """Copies of the shards as ``DTensor``s, for ``torch.distributed.checkpoint``."""


@dataclass
class StateDictConfig:
    """Options of all kinds of state dict.

    Attributes:
        offload_to_cpu: put the tensors on the CPU.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """The configuration of ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: only the first rank gets the tensors; the others get nothing.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """The configuration of ``LOCAL_STATE_DICT``."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """The configuration of ``SHARDED_STATE_DICT``; it holds ``DTensor``s either way."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Options of all kinds of optimizer state dict.

    Attributes:
        offload_to_cpu: put the tensors on the CPU.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """The configuration of a full optimizer state dict.

    Attributes:
        rank0_only: only the first rank gets it; the others get nothing.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """The configuration of a local optimizer state dict."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """The configuration of a sharded optimizer state dict; it holds ``DTensor``s either way."""

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """The state dict options of a module.

    Attributes:
        state_dict_type: the kind.
        state_dict_config: the model's configuration.
        optim_state_dict_config: the optimizer's.
    """

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig

    def optim_options(self) -> OptimStateOptions:
        """Return the options for ``fullshard.sharding`` about the optimizer's state."""
        config = self.optim_state_dict_config
        return OptimStateOptions(
            kind=_OPTIM_KINDS[self.state_dict_type],
            offload_to_cpu=config.offload_to_cpu,
            rank0_only=isinstance(config, FullOptimStateDictConfig) and config.rank0_only,
        )


class HasSettings(Protocol):
    """An object with a kind of state dict, an FSDP1 instance."""

    state_dict_settings: StateDictSettings


_OPTIM_KINDS = {
    StateDictType.FULL_STATE_DICT: OptimStateKind.FULL,
    StateDictType.LOCAL_STATE_DICT: OptimStateKind.SHARDED,  # plain parts would share one name
    StateDictType.SHARDED_STATE_DICT: OptimStateKind.SHARDED,
}
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
_TORCHS = {each.__name__: each for pair in _CONFIGS.values() for each in pair}


def settings_of(
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Return the settings of a kind, with its default configurations for None.

    Raises:
        TypeError: if ``kind`` is no ``StateDictType``.
        RuntimeError: if a configuration is that of another kind.
    """
    kind = require_kind("state_dict_type", kind, StateDictType)
    own, own_optim = _CONFIGS[kind]
    config = own() if config is None else converted(config, _TORCHS)
    optim_config = own_optim() if optim_config is None else converted(optim_config, _TORCHS)
    for name, wanted, came in (
        ("state_dict_config", own, config),
        ("optim_state_dict_config", own_optim, optim_config),
    ):
        if type(came) is not wanted:
            raise RuntimeError(
                f"{name} is a {type(came).__name__}; {kind.name} takes a {wanted.__name__}"
            )
    return StateDictSettings(kind, config, optim_config)


def get_settings(instances: Sequence[HasSettings], module: nn.Module) -> StateDictSettings:
    """Return what all ``instances``, which are those under ``module``, are set to.

    Raises:
        ValueError: if there are none.
        RuntimeError: if they differ.
    """
    if not instances:
        raise ValueError(
            f"{type(module).__name__} holds no FullyShardedDataParallel, so it has no kind of "
            "state dict; wrap it first"
        )
    found = [instance.state_dict_settings for instance in instances]
    for each in found[1:]:
        if each != found[0]:
            raise RuntimeError(
                f"instances under one module are set to different kinds of state dict: {found[0]} "
                f"and {each}; call set_state_dict_type on the module that holds them all"
            )
    return found[0]


def set_settings(
    instances: Sequence[HasSettings], module: nn.Module, settings: StateDictSettings
) -> StateDictSettings:
    """Set all ``instances`` to ``settings``; return what they were set to."""
    before = get_settings(instances, module)
    for instance in instances:
        instance.state_dict_settings = settings
    set_optim_state_options(module, settings.optim_options())
    return before


@contextmanager
def settings_within(
    instances: Sequence[HasSettings], module: nn.Module, settings: StateDictSettings
) -> Iterator[None]:
    """Set all ``instances`` to ``settings`` inside a ``with`` block."""
    before = set_settings(instances, module, settings)
    try:
        yield
    finally:
        set_settings(instances, module, before)
