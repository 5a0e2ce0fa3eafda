"""The arguments ``ignored_modules`` and ``ignored_states`` of an FSDP1 instance.

Owns the reading of both arguments and the walk over what an instance does not leave alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from fullshard.sharding import FSDPModule

__all__ = ["WRAPPED", "Ignored", "is_wrapper", "managed_modules", "read_ignored"]

WRAPPED = "_fsdp_wrapped_module"
"""The name under which a wrapper holds its module."""


def is_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is an FSDP1 instance, rather than the module inside one."""
    return list(module._modules) == [WRAPPED]


@dataclass(frozen=True)
class Ignored:
    """Ignored modules and parameters.

    Attributes:
        modules: modules, with all below them.
        params: parameters, with those of the modules.
    """

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()


def read_ignored(modules: object, states: object, below: Iterable[Ignored]) -> Ignored:
    """Return what the two arguments say, and what instances below leave alone.

    Instances inside an ignored module stay sharded.

    Args:
        modules: ``ignored_modules``: modules, or None.
        states: ``ignored_states``: parameters, modules or both, or None.
        below: ignored modules and parameters of the instances below.

    Raises:
        TypeError: if an argument holds an object of another type.
        ValueError: if both arguments are given, or one holds a sharded module.
    """
    if modules is not None and states is not None:
        raise ValueError(
            "both ignored_modules and ignored_states are given; pass ignored_states, which takes "
            "parameters and modules"
        )
    given: list[nn.Module] = []
    found_params: set[nn.Parameter] = set()
    for each in _listed("ignored_modules", modules):
        if not isinstance(each, nn.Module):
            raise TypeError(f"ignored_modules holds a {type(each).__name__}; pass nn.Modules")
        given.append(each)
    for each in _listed("ignored_states", states):
        if isinstance(each, nn.Module):
            given.append(each)
        elif isinstance(each, nn.Parameter):
            found_params.add(each)
        else:
            raise TypeError(
                f"ignored_states holds a {type(each).__name__}; pass nn.Parameters and nn.Modules"
            )
    for module in given:
        if isinstance(module, FSDPModule) or is_wrapper(module):
            raise ValueError(
                f"{type(module).__name__} is to be ignored, but is sharded already; wrap it "
                "afterwards, or do not ignore it"
            )
    # An instance below an ignored module stays sharded, and manages its own parameters.
    found_modules = {below for each in given for _, below in managed_modules(each)}
    for module in found_modules:
        found_params.update(module.parameters(recurse=False))
    earlier = list(below)
    return Ignored(
        frozenset(found_modules).union(*(each.modules for each in earlier)),
        frozenset(found_params).union(*(each.params for each in earlier)),
    )


def _listed(name: str, value: object) -> Iterable[object]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a list, a set or None")
    return value


def managed_modules(
    root: nn.Module, ignored: frozenset[nn.Module] = frozenset()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``root`` and each module under it by name, but none ignored or in another instance.

    ``root`` itself comes even if it is sharded: then these are the modules of its own group.
    """
    seen = {root}
    waiting = [("", root)]
    while waiting:
        prefix, module = waiting.pop(0)
        yield prefix, module
        for name, child in module.named_children():
            sharded = isinstance(child, FSDPModule) or is_wrapper(child)
            if child not in seen and child not in ignored and not sharded:
                seen.add(child)
                waiting.append((f"{prefix}.{name}" if prefix else name, child))
