"""The calls of ``fully_shard`` that a model wrapped for FairScale stands for, as Python to copy.

Owns the text. It is what the wrappers did, inner ones first, but for what wrapping alone does:
casting buffers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from fullshard.wrappers.fairscale.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.wrappers.fairscale.state_dicts import WRAPPED

__all__ = ["equivalent_calls"]


def equivalent_calls(model: nn.Module, name: str = "model") -> str:
    """Returns the imports and calls that shard the unwrapped model as ``model`` is.

    Args:
        model: a wrapped model, or one that holds wrapped modules.
        name: what the unwrapped model is called in the text.

    Raises:
        ValueError: if nothing under ``model`` is wrapped.
    """
    paths = {
        each: path
        for path, each in model.named_modules()
        if isinstance(each, FullyShardedDataParallel)
    }
    if not paths:
        raise ValueError(
            f"{type(model).__name__} holds no FullyShardedDataParallel; pass a wrapped model"
        )
    imports = {"fully_shard": "fullshard.sharding"}
    inner_first = sorted(paths, key=lambda each: -paths[each].split(".").count(WRAPPED))
    lines = [_call(each, paths[each], name, imports) for each in inner_first]
    lines += list(dict.fromkeys(note for each in paths for note in _notes(each)))
    head = ["import torch"] if any("torch." in line for line in lines) else []
    head += [f"from {module} import {what}" for what, module in sorted(imports.items())]
    return "\n".join([*head, *lines, ""])


def _call(wrapper: FullyShardedDataParallel, path: str, name: str, imports: dict[str, str]) -> str:
    """Returns one call; adds what it needs to ``imports``."""
    inside = ".".join(part for part in path.split(".") if part and part != WRAPPED)
    said = [f"{name}.get_submodule({inside!r})" if inside else name]
    for key, value in wrapper.call.items():
        if key == "mesh":
            imports["DeviceMesh"] = "torch.distributed.device_mesh"
            said.append(f"mesh={wrapper.mesh_code}")
        elif dataclasses.is_dataclass(value):
            imports[type(value).__name__] = "fullshard.policies"
            said.append(f"{key}={_policy(value)}")
        else:
            said.append(f"{key}={value!r}")
    call, cap = f"fully_shard({', '.join(said)})", wrapper.settings.bucket_cap_mb
    if cap == type(wrapper.settings).bucket_cap_mb:
        return call
    return f"{call}.set_reduce_bucket_cap({max(0.0, cap)!r}, recurse=False)"


def _policy(value: Any) -> str:
    shown = [
        f"{each.name}={getattr(value, each.name)!r}"
        for each in dataclasses.fields(value)
        if getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def _notes(wrapper: FullyShardedDataParallel) -> list[str]:
    """Returns what the calls do not say."""
    if not wrapper.buffer_dtypes:
        return []
    return [f"# and cast floating-point buffers to {wrapper.settings.buffer_dtype}"]
