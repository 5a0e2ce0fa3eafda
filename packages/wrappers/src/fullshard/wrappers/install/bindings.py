"""The names that are replaced, and put back: ``install`` and ``uninstall``.

Owns the search: a module that holds torch's object, under any name, holds ours afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fullshard.wrappers.install.cpu_ranks import MODULE, watched_init
from fullshard.wrappers.install.facade import hide, show
from fullshard.wrappers.install.names import (
    PLACES,
    added,
    bound_before,
    helpers,
    pairs,
    shown,
)
from fullshard.wrappers.install.on_import import ImportWatch

__all__ = ["Binding", "Installed", "install", "uninstall"]


@dataclass(frozen=True, eq=False)
class Binding:
    """A name in a module, bound to our object.

    Attributes:
        module: the module, class or function that has the name.
        name: the name in it.
        before: torch's object; None if the name is new.
        after: our object.
    """

    module: Any
    name: str
    before: object
    after: object

    @property
    def where(self) -> str:
        """The full name of the module, class or function."""
        if isinstance(self.module, ModuleType):
            return self.module.__name__
        return f"{self.module.__module__}.{self.module.__qualname__}"

    def put(self) -> None:
        """Make the name mean ours."""
        setattr(self.module, self.name, self.after)

    def put_back(self) -> None:
        """Restore the previous object, unless other code has set a third one."""
        if vars(self.module).get(self.name) is not self.after:
            return
        if self.before is None:
            delattr(self.module, self.name)
        else:
            setattr(self.module, self.name, self.before)


class ShownBinding(Binding):
    """A name in a module of torch's engine, replaced for the code outside of the module."""

    def put(self) -> None:
        """Show our object under the name."""
        show(self.module, self.name, self.after)

    def put_back(self) -> None:
        """Show torch's object again."""
        hide(self.module, self.name)


@dataclass(frozen=True)
class Installed:
    """What ``install`` replaced; as text, the names of each module in a line.

    Attributes:
        bindings: all bindings, including earlier calls.
    """

    bindings: tuple[Binding, ...] = ()

    def __str__(self) -> str:
        """Lists modules and names."""
        places = {each.where: None for each in self.bindings}
        lines = [f"fullshard stands in {len(places)} places for torch's own FSDP:"]
        for place in places:
            names = sorted(each.name for each in self.bindings if each.where == place)
            lines.append(f"  {place}: {', '.join(names)}")
        return "\n".join(lines)


_bindings: list[Binding] = []
_watches: list[ImportWatch] = []  # at most one


def install(*, shard_on_cpu: bool = False) -> Installed:
    """Return what was replaced, after putting ours wherever torch's own FSDP is looked up.

    Names are replaced in ``torch.distributed.fsdp``, ``torch.distributed._composable``, the state
    dict helpers of ``torch.distributed.checkpoint``, and every module imported so far that holds
    such a name: ``fully_shard``, ``replicate``, ``FullyShardedDataParallel``, and the related
    classes and policies. Later imports find ours without another call. Call it once, first thing
    and in each process, as a model that torch's own sharded before is no longer known to what asks
    for a class.

    Args:
        shard_on_cpu: let Accelerate shard on CPU ranks, where it takes DistributedDataParallel by
            itself, whatever its plugin says. Otherwise it warns where it does so.
    """
    _watch_accelerate(shard_on_cpu)
    bound_before()
    public = {id(theirs): (theirs, ours) for theirs, ours in pairs() if theirs is not ours}
    private = dict(public)  # names that torch's own modules keep
    for place, name, ours in shown():
        theirs = vars(sys.modules[place])[name]
        private.setdefault(id(theirs), (theirs, ours))
        _add(ShownBinding(sys.modules[place], name, theirs, ours))
    for module in _modules():
        known = public if module.__name__ in PLACES else private
        for name, value in list(vars(module).items()):
            if id(value) in known:
                _add(Binding(module, name, *known[id(value)]))
    for place, name, ours in helpers():
        module = sys.modules[place]
        if name in vars(module):  # not in every torch
            _add(Binding(module, name, vars(module)[name], ours))
    for owner, name, ours in added():
        _add(Binding(owner, name, vars(owner).get(name), ours))
    return Installed(tuple(_bindings))


def uninstall() -> None:
    """Put back all that ``install`` replaced.

    A module that was imported in between keeps ours, which it found by itself.
    """
    while _watches:
        _watches.pop().stop()
    while _bindings:
        _bindings.pop().put_back()


def _watch_accelerate(shard_on_cpu: bool) -> None:
    def act(state: ModuleType) -> None:
        watched = watched_init(state, shard=shard_on_cpu)
        if watched is not None:
            _add(Binding(watched[0], "__init__", vars(watched[0])["__init__"], watched[1]))

    if not _watches:
        _watches.append(ImportWatch(MODULE, act))
        _watches[0].start()


def _add(binding: Binding) -> None:
    at = (binding.module, binding.name)
    if any((each.module, each.name) == at for each in _bindings):
        return
    _bindings.append(binding)
    binding.put()


def _modules() -> Iterator[ModuleType]:
    """Yield the places in torch, and every module that is neither torch's nor ours."""
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if isinstance(module, ModuleType) and (name in PLACES or top not in ("torch", "fullshard")):
            yield module
