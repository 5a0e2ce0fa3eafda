"""What every module of the workspace keeps to: its public names, its imports, its size."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re

import pytest

from support.members import LIBRARIES, MEMBERS, Module
from support.python import run_python

# Members are listed from the lowest layer to the highest, then the apps.
PACKAGES = [member.package for member in LIBRARIES]
LIBRARY = [module for member in LIBRARIES for module in member.modules()]
APPS = [module for member in MEMBERS if not member.is_library for module in member.modules()]

MAX_LINES = 400


def _package(name: str) -> str:
    """The workspace package that a dotted name lies in, or its top-level name."""
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == "fullshard" else parts[:1])


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def test_there_are_modules_to_check() -> None:
    assert {_package(module.name) for module in LIBRARY + APPS} == {
        member.package for member in MEMBERS if member.has_code
    }


def _rank(name: str) -> tuple[int, str]:
    """A name's place in ``__all__`` as ruff sorts it: CONSTANTS, then Classes, then the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_public_names_are_sorted_and_each_has_a_docstring() -> None:
    bare = []
    for module in LIBRARY:
        if not module.is_public:
            continue
        imported = importlib.import_module(module.name)
        names = imported.__all__
        assert list(names) == sorted(set(names), key=_rank), module.name
        assert imported.__doc__, module.name
        for name in names:
            value = getattr(imported, name)
            # A constant cannot carry a docstring, nor can a C function or C class of torch: the
            # text below it says what it is.
            if inspect.isbuiltin(value) or getattr(value, "__module__", "") == "torch._C":
                continue
            if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
                bare += [f"{module.name}.{name}"] * (not inspect.getdoc(value))
    assert bare == []


@functools.cache
def _references(module: Module) -> set[str]:
    """Every imported name and every attribute chain, in full: ``torch.distributed.fsdp``."""
    chains = {f"{source}.{name}" if name else source for source, name in module.imports()}
    chains |= {
        ast.unparse(node) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)
    }
    return {re.sub(r"^dist\.", "torch.distributed.", chain) for chain in chains}


# The benchmark's contestant: measured there, used nowhere.
RIVAL = "fullshard_bench.contestants.rival"


def test_torchs_own_fsdp_is_never_used() -> None:
    rivals = ("torch.distributed.fsdp.", "torch.distributed._composable.")
    # the table of what was applied to a module, by which torch's replicate knows a sharded one
    register = "torch.distributed._composable.contract."
    uses = [
        f"{module.name}: {name}"
        for module in LIBRARY + APPS
        if module.name != RIVAL
        for name in _references(module)
        if f"{name}.".startswith(rivals) and not f"{name}.".startswith(register)
    ]
    assert uses == []


def test_no_private_name_is_imported_from_another_package_of_ours() -> None:
    imports = []
    for module in LIBRARY + APPS:
        ours = _package(module.name)
        for source, name in module.imports():
            top = source.partition(".")[0]
            if not top.startswith("fullshard") or _package(source) == ours:
                continue
            if _is_private(source) or (name is not None and _is_private(name)):
                imports.append(f"{module.name}: {name} of {source}")
    assert imports == []


def test_torchs_private_names_are_used_in_compat_only() -> None:
    uses = [
        f"{module.name}: {name}"
        for module in LIBRARY
        if not module.name.endswith(".compat")
        for name in _references(module)
        if name.startswith("torch.") and _is_private(name)
    ]
    assert uses == []


def test_modules_of_packages_are_short_enough_to_read() -> None:
    lines = {module.name: len(module.path.read_text().splitlines()) for module in LIBRARY}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_a_package_never_prints() -> None:
    forbidden = {"print", "breakpoint", "pprint"}
    calls = [
        f"{module.name}: {node.func.id}"
        for module in LIBRARY
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in forbidden
    ]
    assert calls == []


@pytest.fixture(scope="module")
def loaded() -> list[set[str]]:
    """Our packages that one process has loaded after importing each, from the lowest up."""
    lines = [f"import {package}; print(*sys.modules)" for package in PACKAGES]
    printed = run_python("-c", "\n".join(["import sys", *lines])).splitlines()
    return [
        {_package(name) for name in line.split() if name.startswith("fullshard")} - {"fullshard"}
        for line in printed
    ]


@pytest.mark.parametrize("position", range(len(PACKAGES)), ids=PACKAGES)
def test_importing_a_package_loads_no_package_above_it(
    position: int, loaded: list[set[str]]
) -> None:
    assert PACKAGES[position] in loaded[position]
    assert loaded[position] <= set(PACKAGES[: position + 1])
