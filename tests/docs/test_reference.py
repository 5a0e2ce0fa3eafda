"""Every public name of the libraries has its place in the API reference."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

from support.members import LIBRARIES, ROOT

REFERENCE = ROOT / "docs" / "reference"
# The wrappers have tests of their own below; the names of the command are words, not Python's.
WITH_A_PAGE = [each.package for each in LIBRARIES if each.folder.name not in ("wrappers", "cli")]


@pytest.mark.parametrize("package", WITH_A_PAGE)
def test_a_page_describes_exactly_the_public_names_of_its_package(package: str) -> None:
    page = (REFERENCE / f"{package.rpartition('.')[2]}.md").read_text()
    # A function whose module has its name is given in full: package.wrap.wrap.
    described = re.findall(rf"(?m)^::: {re.escape(package)}\.(\w+)(?:\.\1)?$", page)
    assert sorted(described) == sorted(importlib.import_module(package).__all__)


@pytest.mark.parametrize("package", ["fullshard.wrappers", "fullshard.wrappers.fairscale"])
def test_the_page_of_the_wrappers_describes_exactly_the_public_names_of(package: str) -> None:
    page = (REFERENCE / "wrappers.md").read_text()
    described = re.findall(rf"(?m)^::: {re.escape(package)}\.(\w+)(?:\.\1)?$", page)
    imported = importlib.import_module(package)
    modules = {module.name for module in pkgutil.iter_modules(imported.__path__)}
    alone = modules - {*imported.__all__}  # pages about whole modules
    assert sorted({*described} - alone) == sorted(imported.__all__)


def test_the_page_of_the_wrappers_says_where_each_of_torchs_names_is_described() -> None:
    page = (REFERENCE / "wrappers.md").read_text()
    named = re.findall(r"\[`(\w+)`\]\[fullshard\.\w+\.(\w+)(?:\.\2)?\]", page)
    assert all(label == target for label, target in named)
    names = importlib.import_module("fullshard.wrappers.fsdp").__all__
    assert sorted(label for label, _ in named) == sorted(names)
