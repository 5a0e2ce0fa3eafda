"""What was recorded of FairScale's names is what the package has."""

from __future__ import annotations

import importlib
import inspect
import types

import pytest

from support.fairscale.names import ARGUMENTS, METHODS, MODULES

pytest.importorskip("fairscale")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def test_the_recorded_names_and_arguments_are_fairscales() -> None:
    from fairscale.nn import FullyShardedDataParallel

    public = {name for name in vars(FullyShardedDataParallel) if not name.startswith("_")}
    assert public == METHODS
    parameters = inspect.signature(FullyShardedDataParallel).parameters
    found = {name: each.default for name, each in parameters.items() if name != "module"}
    assert list(found.items()) == list(ARGUMENTS.items())


@pytest.mark.parametrize("path", MODULES)
def test_the_recorded_names_of_a_module_are_fairscales(path: str) -> None:
    module = importlib.import_module(path)
    found = {
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "").startswith("fairscale")
        and not isinstance(value, types.ModuleType)
    }
    assert found == set(MODULES[path])
