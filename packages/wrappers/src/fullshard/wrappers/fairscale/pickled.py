"""A sharded module as what pickles: its own class, this rank's shards, and none of our hooks.

Owns taking a module apart and putting it together again. Nothing is sent: every rank pickles and
unpickles what it holds. Parameters that are tied across wrappers are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.spi import as_cut
from fullshard.sharding import FSDPModule

__all__ = ["Shards", "put_together", "take_apart"]

_OURS = "fullshard."


@dataclass(frozen=True)
class Shards:
    """A module without its sharded parameters, and those.

    Attributes:
        module: of its own class; stand-ins on the meta device have the place of parameters.
        parts: the module below it that holds a parameter, its name there, and this rank's shard.
    """

    module: nn.Module
    parts: list[tuple[nn.Module, str, torch.Tensor]]


def take_apart(module: nn.Module, wrapper_cls: type[nn.Module]) -> Shards:
    """Return a copy of ``module`` that pickles; it shares what is not a sharded parameter.

    Args:
        module: what was given to ``fully_shard``.
        wrapper_cls: wrappers below it stay as they are: they take themselves apart.

    Raises:
        TypeError: if a parameter is tied to one of another wrapper.
    """
    cast(FSDPModule, module).reshard()
    return _Apart(module, wrapper_cls).shards


class _Apart:
    def __init__(self, module: nn.Module, wrapper_cls: type[nn.Module]) -> None:
        self._wrapper_cls = wrapper_cls
        self._theirs = {
            id(param)
            for each in module.modules()
            if isinstance(each, wrapper_cls)
            for param in each.parameters()
        }
        self._modules: dict[nn.Module, nn.Module] = {}
        self._stand_ins: dict[int, nn.Parameter] = {}
        self._parts: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.shards = Shards(self._copied(module), self._parts)

    def _copied(self, module: nn.Module) -> nn.Module:
        if isinstance(module, self._wrapper_cls):
            return module
        if module in self._modules:
            return self._modules[module]
        copied = object.__new__(_class_of(module))
        self._modules[module] = copied
        copied.__dict__.update(_attributes(module))
        copied._modules = {
            name: None if child is None else self._copied(child)
            for name, child in module._modules.items()
        }
        copied._parameters = {
            name: self._stand_in(copied, name, param) for name, param in module._parameters.items()
        }
        return copied

    def _stand_in(
        self, module: nn.Module, name: str, param: nn.Parameter | None
    ) -> nn.Parameter | None:
        if not isinstance(param, DTensor):
            return param
        if id(param) in self._theirs:
            raise TypeError(
                f"{type(module).__name__}.{name} is tied to a parameter of another wrapper, so it "
                "cannot be pickled; save state_dict() instead"
            )
        found = self._stand_ins.get(id(param))
        if found is None:
            empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
            found = nn.Parameter(empty, requires_grad=param.requires_grad)
            self._stand_ins[id(param)] = found
            self._parts.append((module, name, param.to_local().detach()))
        return found


def _class_of(module: nn.Module) -> type[nn.Module]:
    kind = type(module)
    return kind.__bases__[1] if isinstance(module, FSDPModule) else kind


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of ``module`` without what ``fully_shard`` put there."""
    attributes = {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in vars(module).items()
        if not name.startswith("_fullshard")
    }
    if type(attributes.get("forward")).__module__.startswith(_OURS):
        del attributes["forward"]  # the guard of a sharded parameter
    hooks = [each for name, each in attributes.items() if name.endswith("_hooks") and each]
    ours = {key for each in hooks for key, hook in each.items() if _is_ours(hook)}
    for name, value in attributes.items():
        if "_hooks" in name and isinstance(value, dict):
            for key in ours & value.keys():
                del value[key]
    return attributes


def _is_ours(hook: Any) -> bool:
    for inside in ("hook", "func", "__func__"):
        hook = getattr(hook, inside, hook)
    return str(getattr(hook, "__module__", "")).startswith(_OURS)


def put_together(shards: Shards) -> None:
    """Give ``shards.module``, which was given to ``fully_shard`` again, its parameters."""
    for module, name, local in shards.parts:
        sharded = module._parameters[name]
        assert isinstance(sharded, DTensor), "fully_shard makes DTensors"
        part = as_cut(sharded, local)
        module.load_state_dict({name: part}, strict=False, assign=True)
