"""What a user reads who touches a sharded parameter where nothing gathers it.

Owns the explanation of torch's "got mixed torch.Tensor and DTensor", at no cost to what works.
[Note: touch] A sharded parameter is a plain ``DTensor``, since a subclass of it leaves torch's fast
path: on a CPU with torch 2.13 the step of an optimizer took 13 % (fused AdamW) to 200 % longer (SGD
in a loop). Hooks would cost at every call of every layer. So nothing stands in the way while
parameters are full; while they are sharded, a guard shadows the ``forward`` of each module that
holds one, and explains what it raises. Modules given to ``fully_shard`` gather by themselves, and
explain what their forward raises when that ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from fullshard.sharding.params.param import FSDPParam

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
    """What shadows a module's ``forward`` while its parameters are sharded.

    Attributes:
        watched: the sharded parameters that the module holds.
        carrier: the first of them, whose swaps shut and open the guard.
    """

    def __init__(self, module: nn.Module) -> None:
        """Is open at first."""
        self.watched: list[FSDPParam] = []
        self.carrier: FSDPParam | None = None
        self._module = weakref.ref(module)
        self._attributes = module.__dict__
        self._behind: Callable[..., Any] | None = None
        self._used = True

    def shut(self) -> None:
        """Shadows ``forward``: parameters are sharded."""
        attributes = self._attributes
        found = attributes.get("forward")
        if found is not self and self._used:
            self._behind = found  # what a user put there
            attributes["forward"] = self

    def open(self) -> None:
        """Uncovers ``forward``: parameters are full."""
        attributes = self._attributes
        if attributes.get("forward") is self:
            if self._behind is None:
                del attributes["forward"]
            else:
                attributes["forward"] = self._behind

    def retire(self) -> None:
        """Never shadows again: the module gathers by itself."""
        self.open()
        self._used = False

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The ``forward`` behind it, for ``inspect.signature``."""
        if self._behind is not None:
            return self._behind
        module = self._module()
        assert module is not None, "a module outlives the call of its forward"
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]  # a bound method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``forward``, which may be given a ``DTensor``, and explains what it raises.

        Raises:
            RuntimeError: naming module, parameters and cure, if plain tensors met sharded ones.
        """
        try:
            return self.__wrapped__(*args, **kwargs)
        except RuntimeError as error:
            text = str(error)
            if _SYMPTOM not in text or _CURE in text:
                raise
            raise RuntimeError(f"{self._what()} {_CURE}") from error

    def _what(self) -> str:
        module = self._module()
        names = []
        for param in self.watched:
            for place in param.places:
                if place.module is module and module._parameters.get(place.name) is param.sharded:
                    names.append(param.name)
        name = names[0].rpartition(".")[0] if names else ""
        called = f"{name} ({type(module).__name__})" if name else type(module).__name__
        verb = "is" if len(names) == 1 else "are"
        return f"{called} was called while its {_listed(names)} {verb} sharded."

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        """Returns an open guard of the copied module, which holds ordinary ``DTensor``."""
        copied = memo.get(id(self._module()))
        guard = Guard(copied if isinstance(copied, nn.Module) else nn.Module())
        guard._behind = self._behind
        return guard

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as an open guard of the same module."""
        return Guard, (self._module(),)


def guards_of(param: FSDPParam) -> list[Guard]:
    """Returns the guards that ``param`` shuts and opens: of modules that have none of another."""
    found = []
    for place in param.places:
        guard = place.module.__dict__.get(_ATTRIBUTE)
        if guard is None:
            guard = place.module.__dict__[_ATTRIBUTE] = Guard(place.module)
        if param not in guard.watched:
            guard.watched.append(param)
        if guard.carrier is None:
            guard.carrier = param
        if guard.carrier is param:
            found.append(guard)
    return found


def unguard(modules: Iterable[nn.Module]) -> None:
    """Leaves the ``forward`` of ``modules``, which gather by themselves, as it was."""
    for module in modules:
        guard = module.__dict__.get(_ATTRIBUTE)
        if guard is not None:
            guard.retire()


def explain_touch(error: BaseException | None) -> None:
    """Adds names and cure to ``error`` if plain tensors met sharded ones in it; else does nothing.

    For a forward that gathered its own parameters and used another module's: ``error`` is on its
    way already, so its text is changed.
    """
    if not isinstance(error, RuntimeError):
        return
    text = str(error)
    if _SYMPTOM not in text or _CURE in text:
        return
    names = _names_near(error.__traceback__)
    what = f" It used {_listed(names)}, which is sharded now." if names else ""
    error.args = (f"{text}{what} {_CURE}",)


def _names_near(traceback: TracebackType | None) -> list[str]:
    """Returns the sharded parameters that the innermost method of a module mentions."""
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            mentioned = set(frame.f_code.co_names)
            return [
                name
                for name, param in module.named_parameters()
                if isinstance(param, DTensor) and _is_mentioned(name, mentioned)
            ]
    return []


def _is_mentioned(name: str, mentioned: set[str]) -> bool:
    return all(part.isdigit() or part in mentioned for part in name.split("."))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{'parameter' if len(names) == 1 else 'parameters'} {shown}{more}"
