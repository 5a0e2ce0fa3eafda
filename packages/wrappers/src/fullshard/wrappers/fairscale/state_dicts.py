"""State dicts of FairScale's wrapper: clean names, and whole or local tensors in full precision.

Owns the hooks around saving and loading. Whole tensors are cut, and state dicts in the middle of a
step refused, by ``fullshard.sharding``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.spi import as_cut, whole
from fullshard.wrappers.fairscale.settings import FairScaleSettings
from fullshard.wrappers.fsdp1.state_dicts.parts import PART, attach_hooks
from fullshard.wrappers.ignored_states import WRAPPED

__all__ = ["attach_state_dict_hooks"]


class _Wrapper(Protocol):
    """The interface of the wrapper that the hooks use."""

    settings: FairScaleSettings
    buffer_dtypes: dict[str, torch.dtype]

    @property
    def module(self) -> nn.Module: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def rank(self) -> int: ...


def attach_state_dict_hooks(wrapper: nn.Module) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of ``wrapper`` speak FairScale."""
    attach_hooks(wrapper, _after_save, _before_load)


def _after_save(module: _Wrapper, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    settings = module.settings
    drop = settings.state_dict_on_rank_0_only and module.rank > 0 and not module.is_local
    params = dict(module.module.named_parameters(remove_duplicate=False))
    gathered: dict[nn.Parameter, torch.Tensor] = {}  # a tied parameter is gathered once
    for key in [key for key in state_dict if key.startswith(prefix + PART)]:
        value = state_dict.pop(key)
        name = key[len(prefix) + len(PART) :]
        if isinstance(value, torch.Tensor):
            value = value.to(module.buffer_dtypes.get(name, value.dtype))
        if isinstance(value, DTensor):
            if module.is_local:
                value = value.to_local().detach()
            else:
                if params[name] not in gathered:
                    gathered[params[name]] = whole(value)
                value = gathered[params[name]]
        if isinstance(value, torch.Tensor) and settings.state_dict_device is not None:
            value = value.to(settings.state_dict_device)
        if not drop:
            state_dict[prefix + name] = value
    if drop:
        for key in [key for key in state_dict if key.startswith(prefix)]:
            del state_dict[key]
    versions = getattr(state_dict, "_metadata", {})
    for key in [key for key in versions if WRAPPED in key.split(".")]:
        clean = ".".join(part for part in key.split(".") if part != WRAPPED)
        versions[clean] = versions.pop(key)


def _before_load(module: _Wrapper, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    params = dict(module.module.named_parameters(remove_duplicate=False))
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key[len(prefix) :].removeprefix(PART)
        value = state_dict.pop(key)
        param = params.get(name)
        if module.is_local and isinstance(param, DTensor) and isinstance(value, torch.Tensor):
            value = _as_part(param, value, name)
        state_dict[prefix + PART + name] = value


def _as_part(param: DTensor, value: torch.Tensor, name: str) -> torch.Tensor:
    """Return this rank's shard ``value`` as a ``DTensor``."""
    expected = param.to_local().shape
    if value.shape != expected:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} in the local state dict, and this rank's shard "
            f"has {tuple(expected)}; load a local state dict of the same model on as many ranks, "
            "or a full one with load_state_dict()"
        )
    return as_cut(param, value.to(param.device, param.dtype))
