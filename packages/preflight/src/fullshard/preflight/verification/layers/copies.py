"""The layers of a sharded model: which they are, and copies with full parameters, one at a time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight.compat import copy_hooks, is_compiled
from fullshard.preflight.verification.agree import raise_together
from fullshard.preflight.verification.comparing.tensors import full
from fullshard.preflight.verification.names import clean
from fullshard.preflight.verification.program import Choose, Program
from fullshard.preflight.verification.room import nbytes, reference_device
from fullshard.preflight.verification.sharded import Sharded, aliases
from fullshard.preflight.verification.snapshot import held_by

__all__ = ["Layers", "layer_names"]

_LISTS = (nn.ModuleList, nn.ModuleDict)


class Layers:
    """The layers that are compared, by name.

    Attributes:
        sharded: the model that has them.
        skeleton: the unsharded model, on the meta device.
        names: of the layers, in order.
        modules: of the sharded model, by name.
        owners: how many layers use each parameter.
        device: where copies are made; rank 0's counts.
    """

    def __init__(self, program: Program) -> None:
        """Builds, shards and chooses; an error of one rank is an error of all."""
        choose = program.layers if callable(program.layers) else None
        self.skeleton = raise_together(program.skeleton)
        self.names = raise_together(lambda: layer_names(self.skeleton, choose))
        self.sharded = Sharded(program)
        raise_together(self._require_eager)
        self.untied = raise_together(lambda: self.sharded.untied(self.skeleton))
        self.device = raise_together(self._room)
        self.modules = {clean(name): each for name, each in self.sharded.named.named_modules()}
        self._aliases = aliases(self.skeleton)
        self._hooked = not program.unhooked
        self._begun = held_by(self.sharded.named)
        self.owners = Counter(name for each in self.names for name in self.params_of(each))

    def _require_eager(self) -> None:
        """Return if no module is compiled: what a compiled one does is not seen by hooks."""
        for name, module in self.sharded.model.named_modules():
            if is_compiled(module):
                raise TypeError(
                    f"{clean(name) or 'the model'} is compiled, and layers are compared by what "
                    "they are given and give; leave torch.compile out of shard, or compare the "
                    "whole model with layers=False"
                )

    def _room(self) -> torch.device:
        """Where the largest layer has room; rank 0 alone needs it."""
        largest = max(self.names, key=lambda name: nbytes(self.skeleton.get_submodule(name)))
        layer, home = self.skeleton.get_submodule(largest), self.sharded.home
        if dist.get_rank() > 0:
            return home
        return reference_device(layer, home, f"the layer {largest} alone")

    def known(self, name: str) -> str:
        """Return the name by which the sharded model knows a parameter, which may be tied."""
        return self._aliases.get(name, name)

    def params_of(self, layer: str) -> list[str]:
        """Return the names, by which the sharded model knows them, of a layer's parameters."""
        inner = self.skeleton.get_submodule(layer).named_parameters(remove_duplicate=False)
        return list(dict.fromkeys(self.known(f"{layer}.{name}") for name, _ in inner))

    def groups(self) -> list[list[str]]:
        """Return the parameters of each layer, tied ones once, then each one outside of layers."""
        done: set[str] = set()
        groups = []
        for name in self.names:
            groups.append([each for each in self.params_of(name) if each not in done])
            done.update(groups[-1])
        return groups + [[name] for name in self.sharded.params if name not in done]

    def copy(self, name: str, held: dict[str, Any]) -> nn.Module | None:
        """Return a layer with full parameters on rank 0, None on others; all ranks call it.

        Args:
            name: of the layer.
            held: by name, the buffers and attributes that the copy begins with.
        """
        is_first = dist.get_rank() == 0
        layer = copy.deepcopy(self.skeleton.get_submodule(name)) if is_first else None
        trained = dict(self.skeleton.named_parameters())
        values: dict[str, nn.Parameter] = {}
        for param in self.params_of(name):
            value = full(self.sharded.params[param])
            if is_first:
                value = value.to(self.device, trained[param].dtype, copy=True)
                values[param] = nn.Parameter(value, requires_grad=trained[param].requires_grad)
                if self._hooked:
                    copy_hooks(trained[param], values[param])
        if layer is not None:
            for path, module in layer.named_modules():
                self._fill(module, f"{name}.{path}" if path else name, values, held)
        return layer

    def _fill(
        self,
        module: nn.Module,
        where: str,
        values: dict[str, nn.Parameter],
        held: dict[str, Any],
    ) -> None:
        """Give one module its parameters, buffers, and attributes that are numbers or tensors."""
        ours = self.modules[where]
        for key in vars(ours):
            value = held.get(f"{where}.{key}")
            if isinstance(value, torch.Tensor):
                setattr(module, key, value.to(self.device, copy=True))
            elif value != self._begun.get(f"{where}.{key}", value):  # a forward changes it
                setattr(module, key, value)
        module.train(ours.training)
        for key, _ in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, key, values[self.known(f"{where}.{key}")])
        for key, _ in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, key, held[f"{where}.{key}"].to(self.device, copy=True))


def layer_names(model: nn.Module, choose: Choose | None = None) -> list[str]:
    """Return the names of the layers, in the order of the modules; no layer contains another.

    By default the layers are the elements of the outermost lists of modules, and the largest
    modules that contain no such list.

    Raises:
        ValueError: if the model has no layer. Also if ``choose`` returned no module, the model
            itself, a module of another model, or a module inside another.
    """
    if choose is None:
        found = list(_outermost("", model))
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no modules in it that could be compared one by one; "
                "pass a build_model of less depth or width"
            )
        return found
    wanted = list(choose(model))
    names = {id(module): name for name, module in model.named_modules()}
    given = [names.get(id(module)) for module in wanted]
    inner = {id(below) for module in wanted for below in module.modules() if below is not module}
    if not wanted or None in given or "" in given or any(id(module) in inner for module in wanted):
        raise ValueError(
            f"layers returned {given or 'nothing'} (None: no module of the model it was given); "
            "return some of the model's own modules, not the model, and none inside another"
        )
    return sorted({str(name) for name in given}, key=list(names.values()).index)


def _outermost(path: str, module: nn.Module) -> Iterator[str]:
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        nested = not _is_list(module) and any(_is_list(each) for each in child.modules())
        if _is_list(child) or nested:
            yield from _outermost(full, child)
        else:
            yield full


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, _LISTS) or type(module) is nn.Sequential
