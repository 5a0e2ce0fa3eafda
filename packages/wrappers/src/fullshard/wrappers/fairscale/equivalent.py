"""The calls of ``fully_shard`` that a model wrapped for FairScale stands for, as Python to copy.

Owns the text. The text repeats the calls of the wrappers, inner wrappers first, except for work
that only wrapping does: casting buffers.
"""

from __future__ import annotations

import dataclasses

from torch import nn

from fullshard.wrappers.call_text import construction
from fullshard.wrappers.fairscale.fully_sharded_data_parallel import FullyShardedDataParallel
from fullshard.wrappers.ignored_states import WRAPPED
from fullshard.wrappers.wrapper import wrappers_under

__all__ = ["equivalent_calls"]


def equivalent_calls(model: nn.Module, name: str = "model") -> str:
    """Return the imports and calls that shard the unwrapped model as ``model`` is.

    Args:
        model: a wrapped model, or one that holds wrapped modules.
        name: what the unwrapped model is called in the text.

    Raises:
        ValueError: if nothing under ``model`` is wrapped.
    """
    paths = wrappers_under(model, FullyShardedDataParallel)
    imports = {"fully_shard": "fullshard.sharding"}
    lines = [_call(each, path, name, imports) for each, path in paths.items()]
    lines += list(dict.fromkeys(note for each in paths for note in _notes(each)))
    head = ["import torch"] if any("torch." in line for line in lines) else []
    head += [f"from {module} import {what}" for what, module in sorted(imports.items())]
    return "\n".join([*head, *lines, ""])


def _call(wrapper: FullyShardedDataParallel, path: str, name: str, imports: dict[str, str]) -> str:
    """Return one call; add what it needs to ``imports``."""
    inside = ".".join(part for part in path.split(".") if part and part != WRAPPED)
    said = [f"{name}.get_submodule({inside!r})" if inside else name]
    for key, value in wrapper.call.items():
        if key == "mesh":
            imports["DeviceMesh"] = "torch.distributed.device_mesh"
            said.append(f"mesh={wrapper.mesh_code}")
        elif dataclasses.is_dataclass(value):
            imports[type(value).__name__] = "fullshard.policies"
            said.append(f"{key}={construction(value)}")
        else:
            said.append(f"{key}={value!r}")
    return f"fully_shard({', '.join(said)})"


def _notes(wrapper: FullyShardedDataParallel) -> list[str]:
    """Return what the calls do not say."""
    if not wrapper.buffer_dtypes:
        return []
    return [f"# and cast floating-point buffers to {wrapper.settings.buffer_dtype}"]
