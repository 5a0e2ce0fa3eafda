"""Finds code that reaches around autograd, by its source: ``.data`` and ``.grad``."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["lines_with"]

_NAMES = ("data", "grad")


def lines_with(thing: Any) -> list[str]:
    """Returns ``file:line, code`` of each place in ``thing`` that uses ``.data`` or ``.grad``.

    Classes of torch itself have none that matter; what has no source has none that can be seen.
    """
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
