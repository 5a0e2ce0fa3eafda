"""The names that are replaced, and put back: ``install`` and ``uninstall``.

Owns the search: a module that holds the very object that ours stands for, whatever it calls it,
holds ours afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from fullshard.wrappers.install.names import PLACES, bound_before, helpers, pairs

__all__ = ["Binding", "Installed", "install", "uninstall"]


@dataclass(frozen=True, eq=False)
class Binding:
    """One name in one module, which means ours.

    Attributes:
        module: the module.
        name: the name in it.
        before: what it meant.
        after: what it means now.
    """

    module: ModuleType
    name: str
    before: object
    after: object

    def put(self) -> None:
        """Makes the name mean ours."""
        setattr(self.module, self.name, self.after)

    def put_back(self) -> None:
        """Makes it mean what it meant, unless somebody gave it a third meaning."""
        if vars(self.module).get(self.name) is self.after:
            setattr(self.module, self.name, self.before)


@dataclass(frozen=True)
class Installed:
    """What ``install`` replaced; as text, the names of each module in a line.

    Attributes:
        bindings: all of it, that of earlier calls included.
    """

    bindings: tuple[Binding, ...] = ()

    def __str__(self) -> str:
        """Lists modules and names."""
        modules = {each.module.__name__: None for each in self.bindings}
        lines = [f"fullshard stands in {len(modules)} modules for torch's own FSDP:"]
        for module in modules:
            names = sorted(each.name for each in self.bindings if each.module.__name__ == module)
            lines.append(f"  {module}: {', '.join(names)}")
        return "\n".join(lines)


_bindings: list[Binding] = []


def install() -> Installed:
    """Returns what was replaced, after putting ours wherever torch's own FSDP is looked up.

    In ``torch.distributed.fsdp``, ``torch.distributed._composable``, the state dict helpers of
    ``torch.distributed.checkpoint``, and in every module imported so far that holds one of those
    names: ``fully_shard``, ``replicate``, ``FullyShardedDataParallel``, and the classes and
    policies beside them. What is imported later finds ours by itself. Call it once, first thing
    and in each process, as a model that torch's own sharded before is no longer known to what asks
    for a class.
    """
    bound_before()
    known = {id(theirs): (theirs, ours) for theirs, ours in pairs() if theirs is not ours}
    for module in _modules():
        for name, value in list(vars(module).items()):
            if id(value) in known:
                _add(module, name, *known[id(value)])
    for place, name, ours in helpers():
        module = sys.modules[place]
        if name in vars(module):  # not in every torch
            _add(module, name, vars(module)[name], ours)
    return Installed(tuple(_bindings))


def uninstall() -> None:
    """Puts back all that ``install`` replaced.

    A module that was imported in between keeps ours, which it found by itself.
    """
    while _bindings:
        _bindings.pop().put_back()


def _add(module: ModuleType, name: str, before: object, after: object) -> None:
    if any(each.module is module and each.name == name for each in _bindings):
        return
    _bindings.append(Binding(module, name, before, after))
    _bindings[-1].put()


def _modules() -> Iterator[ModuleType]:
    """Yields the places in torch, and every module that is neither torch's nor ours."""
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if isinstance(module, ModuleType) and (name in PLACES or top not in ("torch", "fullshard")):
            yield module
