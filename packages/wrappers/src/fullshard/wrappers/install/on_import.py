"""Calls a function when a module is imported: at once, if it is imported already.

Owns the finder that waits for the module. Refuses: importing the module by itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ImportWatch"]


class ImportWatch(MetaPathFinder):
    """A finder that finds nothing itself, and sees one module being found."""

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        """Take the module's full name, and what to call with it once it was executed."""
        self._name, self._act = name, act

    def start(self) -> None:
        """Act, or wait for the import."""
        if self._name in sys.modules:
            self._act(sys.modules[self._name])
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders find, which acts after execution."""
        if fullname != self._name:
            return None
        self.stop()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self._act(module)

        loader.exec_module = execute_and_act
        return spec
