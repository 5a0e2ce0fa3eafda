"""Scripts of the repository that are no package, as modules: ``tools`` and ``examples``."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from support.members import ROOT


def load_tool(name: str) -> ModuleType:
    return _load("tools", name)


def load_example(name: str) -> ModuleType:
    """The module of ``examples/name.py``, newly loaded; also on a rank."""
    return _load("examples", name)


def _load(folder: str, name: str) -> ModuleType:
    path = ROOT / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
