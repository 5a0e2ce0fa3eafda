"""Which modules are the layers: what is run again alone, and must fit unsharded."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fullshard.preflight.verification.program import Choose

__all__ = ["layer_names"]

_LISTS = (nn.ModuleList, nn.ModuleDict)


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
