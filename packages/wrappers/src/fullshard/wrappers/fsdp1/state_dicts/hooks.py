"""Contents of state dicts of a wrapped module: clean names, and whole, sharded or local tensors.

Owns the hooks around saving and loading. Full tensors are cut, and state dicts of a module in the
middle of a step refused, by ``fullshard.sharding``.

[Note: snapshots] As in torch, whole and sharded tensors are copies, which training does not change.
Local tensors are the shards themselves. Buffers and ignored parameters are as ``nn.Module`` gives
them. Everything is a copy with ``offload_to_cpu=True``, including tensors that are on the CPU
already: torch returns that itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.spi import Place, as_cut, fitted, unwrapped, whole
from fullshard.wrappers.fsdp1.given import Given
from fullshard.wrappers.fsdp1.state_dicts.parts import PART, attach_hooks
from fullshard.wrappers.fsdp1.state_dicts.types import FullStateDictConfig, StateDictType
from fullshard.wrappers.ignored_states import WRAPPED

__all__ = ["attach_state_dict_hooks"]


def attach_state_dict_hooks(wrapper: Given) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of ``wrapper`` what it is set to."""
    attach_hooks(wrapper, _after_save, _before_load)


def _after_save(module: Given, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    inner = prefix + PART
    found = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    nested = tuple(
        f"{prefix}{name}." for name, each in module.named_modules() if _is_nested(each, module)
    )
    save = _Saved(module)
    for key, value in found.items():
        name = key.removeprefix(inner).removeprefix(prefix)
        clean = prefix + name
        if nested and clean.startswith(nested):
            state_dict[clean] = value  # that instance's own hook saw to it
        elif save.keep(name, value):
            state_dict[clean] = save.last
    versions = getattr(state_dict, "_metadata", {})
    for key in [key for key in versions if f".{key}.".startswith(f".{prefix}{WRAPPED}.")]:
        rest = key.removeprefix(prefix + WRAPPED).removeprefix(".")
        versions[(prefix + rest).removesuffix(".")] = versions.pop(key)


def _is_nested(module: nn.Module, instance: Given) -> bool:
    return type(module) is type(instance) and module is not instance


class _Saved:
    """The values of one instance's state dict; tied parameters are gathered once."""

    def __init__(self, module: Given) -> None:
        settings = module.instance.state_dict_settings
        self.last: Any = None
        self._kind = settings.state_dict_type
        if self._kind is StateDictType.LOCAL_STATE_DICT and not module.instance.shards:
            self._kind = StateDictType.FULL_STATE_DICT  # as torch's: every rank has all of it
        self._to_cpu = settings.state_dict_config.offload_to_cpu
        config = settings.state_dict_config
        first_only = isinstance(config, FullStateDictConfig) and config.rank0_only
        self._keeps = not first_only or module.instance.ranks.is_first
        self._buffers = module.instance.buffer_dtypes
        self._ties = {
            name: id(param) for name, param in module.named_parameters(remove_duplicate=False)
        }
        self._done: dict[int, Any] = {}

    def keep(self, name: str, value: Any) -> bool:
        """Put what is saved for ``value`` into ``last``; return whether this rank saves it."""
        tie = self._ties.get(name)
        if tie is not None and tie in self._done:
            self.last = self._done[tie]
            return self._keeps
        self.last = self._saved(name, value)
        if tie is not None:
            self._done[tie] = self.last
        return self._keeps

    def _saved(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if name in self._buffers:
            value = value.to(self._buffers[name])
        to_cpu = self._to_cpu and self._keeps
        if isinstance(value, DTensor) and self._kind is StateDictType.FULL_STATE_DICT:
            full = whole(value)
            return full.cpu() if to_cpu else full
        if isinstance(value, DTensor) and self._kind is StateDictType.SHARDED_STATE_DICT:
            return value.detach().to("cpu" if to_cpu else value.device, copy=True)
        return value.detach().to("cpu", copy=True) if to_cpu else value


def _before_load(module: Given, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    params = dict(module.named_parameters(remove_duplicate=False))
    local = module.instance.state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key[len(prefix) :].removeprefix(PART)
        value = state_dict.pop(key)
        param = params.get(name)
        if isinstance(param, DTensor) and isinstance(value, torch.Tensor):
            value = _as_stored(name, param, value, local=local)
        state_dict[prefix + PART + name] = value


def _as_stored(name: str, param: DTensor, value: torch.Tensor, *, local: bool) -> torch.Tensor:
    """Return ``value`` as a ``DTensor`` on the parameter's device, if it is a part of one.

    Brings together, on every rank, a part of a tensor that is cut otherwise.
    """
    value = fitted(param, unwrapped(Place(name, "the value", param), value))
    if isinstance(value, DTensor):
        return value if value.device == param.device else value.to(param.device)
    if not local or value.shape != param.to_local().shape:
        return value  # whole, or wrong: the engine cuts the one and names the other
    return as_cut(param, value.to(param.device, param.dtype))
