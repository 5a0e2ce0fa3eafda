"""Lines of a user's code that autograd or the sharding see nothing of."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

from torch import nn

from fullshard.preflight.verification.names import module_of
from fullshard.preflight.verification.program import Program

__all__ = ["lines_that_bypass"]

_NAMES = ("data", "grad", "to_local")


def lines_that_bypass(program: Program, module: str) -> list[str]:
    """Return ``file:line, code`` of each use of ``.data``, ``.grad`` or ``to_local()``.

    In the class of ``module``, of those around it, and in the loss.
    """
    places = []
    modules = dict(program.built().named_modules())
    for name in dict.fromkeys((module, module_of(module), "")):
        if isinstance(modules.get(name), nn.Module):
            places += _lines_in(type(modules[name]))
    return places + _lines_in(program.step or program.loss)


def _lines_in(thing: Any) -> list[str]:
    """The lines of a class or function; of torch's own none matter, and some have no source."""
    if isinstance(thing, type) and thing.__module__.startswith("torch."):
        return []
    try:
        source, first = inspect.getsourcelines(thing)
        file = Path(inspect.getfile(thing)).name
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OSError, TypeError, SyntaxError):
        return []
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _NAMES
    ]
    lines = sorted({node.lineno for node in found if not _is_namespace(node)})
    return [f"{file}:{first + line - 1}, `{source[line - 1].strip()}`" for line in lines]


def _is_namespace(node: ast.Attribute) -> bool:
    """Whether it is ``torch.utils.data`` or the like, not a tensor's attribute."""
    return ast.unparse(node).startswith(("torch.", "F.", nn.__name__))
