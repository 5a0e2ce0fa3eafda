"""State dicts of FairScale's wrapper: clean names, and whole or local tensors in full precision.

Owns the hooks around saving and loading. Whole tensors are cut, and state dicts in the middle of a
step refused, by ``fullshard.sharding``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from fullshard.wrappers.fairscale.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["WRAPPED", "attach_state_dict_hooks"]

WRAPPED = "_fsdp_wrapped_module"
_PART = f"{WRAPPED}."


def attach_state_dict_hooks(wrapper: FullyShardedDataParallel) -> None:
    """Makes ``state_dict()`` and ``load_state_dict()`` of ``wrapper`` speak FairScale."""
    nn.Module.register_state_dict_post_hook(wrapper, _after_save)
    nn.Module.register_load_state_dict_pre_hook(wrapper, _before_load)
    nn.Module.register_load_state_dict_post_hook(wrapper, _after_load)


def _after_save(
    module: FullyShardedDataParallel, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    settings = module.settings
    drop = settings.state_dict_on_rank_0_only and module.rank > 0 and not module.is_local
    params = dict(module.module.named_parameters(remove_duplicate=False))
    whole: dict[nn.Parameter, torch.Tensor] = {}  # a tied parameter is gathered once
    for key in [key for key in state_dict if key.startswith(prefix + _PART)]:
        value = state_dict.pop(key)
        name = key[len(prefix) + len(_PART) :]
        if isinstance(value, torch.Tensor):
            value = value.to(module.buffer_dtypes.get(name, value.dtype))
        if isinstance(value, DTensor):
            if module.is_local:
                value = value.to_local().detach()
            else:
                if params[name] not in whole:
                    whole[params[name]] = _whole(value)
                value = whole[params[name]]
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


def _whole(tensor: DTensor) -> torch.Tensor:
    """Returns the full tensor, on the mesh's device: shards may live on the CPU."""
    there = tensor.detach().to(tensor.device_mesh.device_type)
    assert isinstance(there, DTensor), "moving keeps the type"
    return there.full_tensor()


def _before_load(
    module: FullyShardedDataParallel, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    params = dict(module.module.named_parameters(remove_duplicate=False))
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = key[len(prefix) :].removeprefix(_PART)
        value = state_dict.pop(key)
        param = params.get(name)
        if module.is_local and isinstance(param, DTensor) and isinstance(value, torch.Tensor):
            value = _as_part(param, value, name)
        state_dict[prefix + _PART + name] = value


def _as_part(param: DTensor, value: torch.Tensor, name: str) -> torch.Tensor:
    """Returns this rank's shard ``value`` as a ``DTensor``."""
    expected = param.to_local().shape
    if value.shape != expected:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} in the local state dict, and this rank's shard "
            f"has {tuple(expected)}; load a local state dict of the same model on as many ranks, "
            "or a full one with load_state_dict()"
        )
    return DTensor.from_local(
        value.to(param.device, param.dtype),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _after_load(module: nn.Module, incompatible: Any) -> None:
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(_PART, "") for key in keys]
