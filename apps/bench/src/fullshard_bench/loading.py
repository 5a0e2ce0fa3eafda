"""A user's own object from the text `package.module:name`.

Owns the import and its errors. The folder in which the benchmark was started is searched too.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from fullshard_bench.errors import BenchError

__all__ = ["load_object"]


def load_object(text: str, option: str) -> Any:
    """Return the callable that `text` names.

    Raises:
        BenchError: the text has another form, or module or name is not there.
    """
    module_name, colon, name = text.partition(":")
    if not (colon and module_name and name):
        raise BenchError(f"{option} {text!r}: must look like package.module:name")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise BenchError(f"{option} {text!r}: cannot import {module_name}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise BenchError(f"{option} {text!r}: {module_name} has nothing callable named {name}")
    return found
