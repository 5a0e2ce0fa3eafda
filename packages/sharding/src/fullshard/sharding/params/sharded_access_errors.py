"""Explains torch's "got mixed torch.Tensor and DTensor" to a user who called a sharded layer.

Owns the explanation, at no cost to what works. [Note: touch] A sharded parameter is a plain
``DTensor``, since a subclass of it leaves torch's fast path: on a CPU with torch 2.13 the step of
an optimizer took 13 % (fused AdamW) to 200 % longer (SGD in a loop). Hooks would cost at every call
of every layer, and torch raises that error below Python. Full parameters therefore have no guard;
while they are sharded, a guard shadows the ``forward`` of each module that holds one. The guard
does one thing: it explains, for a layer that is called by itself, which parameters are sharded and
what to do. Modules given to ``fully_shard`` gather by themselves, and explain what their forward
raises when that ends.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.sharding.params.lookup import owner_of

__all__ = ["Guard", "explain_touch", "guards_of", "unguard"]

_ATTRIBUTE = "_fullshard_guard"
_SYMPTOM = "got mixed torch.Tensor and DTensor"
_SHOWN = 4  # names in an explanation

_CURE = (
    "Parameters are gathered by the forward of a module that was given to fully_shard, for as long "
    "as it runs. Call that module; or give this part a fully_shard of its own; or, for another "
    "method than forward, call register_fsdp_forward_method(module, name) on the sharded module; "
    "or use it inside `with fullshard.sharding.unsharded(module):`, on every rank."
)


class Guard:
    """The replacement of a module's ``forward`` while its parameters are sharded; see ``Swap``.

    The guard replaces the class's ``forward``: a ``forward`` that a user put on the module stays
    where it is, and may call the guard that it found there. A copy is the copied module's.

    Attributes:
        module: whose.
    """

    def __init__(self, module: nn.Module) -> None:
        """Is open at first."""
        self.module = module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The ``forward`` behind it, for ``inspect.signature``."""
        return type(self.module).forward.__get__(self.module)  # type: ignore[no-any-return]  # a bound method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward``, which may be given a ``DTensor``, and explains what it raises.

        Raises:
            RuntimeError: naming module, parameters and cure, if plain tensors met sharded ones.
        """
        try:
            return self.__wrapped__(*args, **kwargs)
        except RuntimeError as error:
            if not _is_unexplained(error):
                raise
            raise RuntimeError(f"{self._what()} {_CURE}") from error

    def _what(self) -> str:
        owners = [owner_of(p) for p in self.module._parameters.values() if p is not None]
        names = [owner.name for owner in owners if owner is not None]
        kind = type(self.module).__name__
        name = names[0].rpartition(".")[0] if names else ""
        called = f"{name} ({kind})" if name else kind
        verb = "is" if len(names) == 1 else "are"
        return f"{called} was called while its {_listed(names)} {verb} sharded."


def guards_of(modules: Iterable[nn.Module]) -> list[Guard]:
    """Return the guards of ``modules``, made at the first call.

    Modules that gather by themselves need none, and traced ones run no Python.
    """
    found = [
        module.__dict__.setdefault(_ATTRIBUTE, Guard(module))
        for module in modules
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    return [guard for guard in found if guard is not None]


def unguard(modules: Iterable[nn.Module]) -> None:
    """Leave the ``forward`` of ``modules``, which gather by themselves, as it was."""
    for module in modules:
        for param in module._parameters.values():
            owner = None if param is None else owner_of(param)
            if owner is not None:  # its group looks for guards again
                owner.generation.replacements += 1
        if isinstance(module.__dict__.get("forward"), Guard):
            del module.__dict__["forward"]
        module.__dict__[_ATTRIBUTE] = None


def explain_touch(error: BaseException | None) -> None:
    """Add names and cure to ``error`` if plain tensors met sharded ones in it; else does nothing.

    For a forward that gathered its own parameters and used another module's: ``error`` is on its
    way already, so its text is changed.
    """
    if _is_unexplained(error):
        names = _names_near(error)
        what = f" It used {_listed(names)}, which is sharded now." if names else ""
        error.args = (f"{error}{what} {_CURE}",)


def _is_unexplained(error: BaseException | None) -> TypeGuard[RuntimeError]:
    return isinstance(error, RuntimeError) and _SYMPTOM in str(error) and _CURE not in str(error)


def _names_near(error: BaseException) -> list[str]:
    """Return the sharded parameters that the innermost method of a module mentions."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return [
                name
                for name, param in module.named_parameters()
                if isinstance(param, DTensor)
                and all(part.isdigit() or part in frame.f_code.co_names for part in name.split("."))
            ]
    return []


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{'parameter' if len(names) == 1 else 'parameters'} {shown}{more}"
