"""Scripts of the repository's ``tools`` folder, as modules: the folder is no package."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from support.members import ROOT


def load_tool(name: str) -> ModuleType:
    """The module of ``tools/name.py``, newly loaded."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
