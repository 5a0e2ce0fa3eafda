"""The calls of ``fully_shard`` that a wrapped model stands for, as Python to copy.

Owns the text. The text repeats the calls of the wrappers, in their order, except for work that only
wrapping does: casting the root's inputs and buffers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.policies import MixedPrecisionPolicy
from fullshard.wrappers.call_text import construction
from fullshard.wrappers.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel
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
    return _Text(model, name).text(list(wrappers_under(model, FullyShardedDataParallel)))


class _Text:
    def __init__(self, model: nn.Module, name: str) -> None:
        self._model = model
        self._name = name
        self._paths = {module: path for path, module in model.named_modules()}
        self._params = {id(param): path for path, param in model.named_parameters()}
        self._roots = FullyShardedDataParallel.fsdp_modules(model, root_only=True)
        self._codes: dict[DeviceMesh, str] = {}
        for wrapper in FullyShardedDataParallel.fsdp_modules(model):
            ranks = wrapper.instance.ranks
            if ranks.mesh is not None:  # the outermost knows how it was made; it hands it down
                self._codes.setdefault(ranks.mesh, ranks.code)
        self._imports: dict[str, set[str]] = {}
        self._meshes: dict[str, str] = {}
        self._notes: dict[str, None] = {}

    def text(self, wrappers: list[FullyShardedDataParallel]) -> str:
        calls = [self._call(each) for each in wrappers]
        meshes = [f"{target} = {code}" for code, target in self._meshes.items()]
        imports = ["import torch"] if any("torch." in line for line in calls) else []
        imports += [
            f"from {module} import {', '.join(sorted(names))}"
            for module, names in sorted(self._imports.items(), reverse=True)
        ]
        return "\n".join([*imports, "", *meshes, *calls, *self._notes, ""])

    def _call(self, wrapper: FullyShardedDataParallel) -> str:
        call = wrapper.instance.call
        self._import("fullshard.sharding", call.function)
        module = self._module(self._paths[wrapper])
        said = [
            f"{key}={self._value(wrapper, value)}"
            for key, value in call.arguments.items()
            if key != "ignored_params"
        ]
        ignored = call.arguments.get("ignored_params", ())
        names = sorted(self._params[id(each)] for each in ignored if id(each) in self._params)
        if names:
            each = [f"{self._name}.get_parameter({name!r})" for name in names]
            said.append(f"ignored_params={{{', '.join(each)}}}")
        self._note(wrapper)
        return f"{call.function}({', '.join([module, *said])})"

    def _value(self, wrapper: FullyShardedDataParallel, value: Any) -> str:
        if isinstance(value, DeviceMesh):
            return self._mesh(self._codes[value])
        if isinstance(value, bool):
            return repr(value)
        if isinstance(value, MixedPrecisionPolicy) and not value.cast_forward_inputs:
            inputs = wrapper.mixed_precision.input_dtype(is_root=wrapper in self._roots)
            value = dataclasses.replace(value, cast_forward_inputs=inputs is not None)
        self._import("fullshard.policies", type(value).__name__)
        return construction(value)

    def _mesh(self, code: str) -> str:
        if code.isidentifier():
            return code
        maker = code.partition("(")[0].partition(".")[0]
        self._import("torch.distributed.device_mesh", maker)
        return self._meshes.setdefault(code, f"mesh{len(self._meshes) or ''}")

    def _module(self, path: str) -> str:
        text, module = self._name, self._model
        for part in path.split(".") if path else ():
            listed = isinstance(self._inside(module), (nn.Sequential, nn.ModuleList))
            if not (listed or part.isidentifier()):
                return f"{self._name}.get_submodule({path!r})"
            text += f"[{part}]" if listed else f".{part}"
            module = module.get_submodule(part)
        return text

    def _inside(self, module: nn.Module) -> nn.Module:
        return module.module if isinstance(module, FullyShardedDataParallel) else module

    def _import(self, module: str, name: str) -> None:
        self._imports.setdefault(module, set()).add(name)

    def _note(self, wrapper: FullyShardedDataParallel) -> None:
        """Add what the calls do not say."""
        precision = wrapper.mixed_precision
        if precision.buffer_dtype is not None:
            self._notes[f"# and cast floating-point buffers to {precision.buffer_dtype}"] = None
        if precision.keep_low_precision_grads:
            self._notes[f"# and cast gradients to {precision.low_precision}"] = None
        if wrapper.instance.has_hook:
            self._notes["# and hand the communication hook to set_custom_reduce_scatter()"] = None
