"""Check that an object from a caller has the methods of a protocol, with the right arguments.

Owns: the error that names what is missing or cannot be called so. Refuses: asking for base classes:
what has the methods is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

__all__ = ["require"]


def require(protocol: type, value: object) -> None:
    """Require that ``value`` is an instance with all methods of ``protocol``.

    Methods must accept the arguments of their calls: those that the protocol gives as
    positional-only by position, all others by name.

    Raises:
        TypeError: naming the methods that are missing or take other arguments.
    """
    kind = protocol.__name__
    if inspect.isclass(value):
        raise TypeError(
            f"got the class {value.__name__}; {kind} must be an instance. Pass {value.__name__}()."
        )
    missing = [said for name, method in _methods(protocol) if (said := _lack(value, name, method))]
    if missing:
        raise TypeError(
            f"got {type(value).__name__}, which is no {kind}: it has no usable "
            f"{' and no '.join(missing)}. Add them; fullshard.comm.{kind} says what each is for."
        )


def _methods(protocol: type) -> Iterator[tuple[str, Callable[..., object]]]:
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False):
            for name, member in vars(base).items():
                if inspect.isfunction(member) and (name == "__call__" or name[0] != "_"):
                    yield name, member


def _lack(value: object, name: str, asked: Callable[..., object]) -> str:
    """The method as in a signature, ``allocate(size, *, dtype, device)``, if there is none such."""
    _, *rest = inspect.signature(asked).parameters.values()
    positional = [each.name for each in rest if each.kind is each.POSITIONAL_ONLY]
    named = [each.name for each in rest if each.kind is not each.POSITIONAL_ONLY]
    star = ["*"] if positional and named else []
    said = f"{name}({', '.join([*positional, *star, *named])})"
    method = value if name == "__call__" else getattr(value, name, None)
    if not callable(method) or getattr(method, "__func__", None) is asked:
        return said  # missing, or inherited from the protocol, where nothing is written
    try:
        inspect.signature(method).bind(*positional, **dict.fromkeys(named))
    except ValueError:  # written in C: nothing to check
        return ""
    except TypeError:
        return said
    return ""
