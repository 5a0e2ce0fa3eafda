"""The page on moving from Accelerate names what Accelerate has."""

from __future__ import annotations

import dataclasses
import re

import pytest

from support.members import ROOT

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

PAGE = (ROOT / "docs" / "how-to" / "from-accelerate.md").read_text()


def _first_cells(heading: str) -> set[str]:
    """The names in the first column of the table under a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows[1:] for name in re.findall(r"`(\w+)[`=]", row)}


def test_each_option_is_one_of_the_plugin() -> None:
    from accelerate import FullyShardedDataParallelPlugin

    options = _first_cells("The plugin's options")
    fields = {each.name for each in dataclasses.fields(FullyShardedDataParallelPlugin)}
    assert len(options) >= 10
    assert options <= fields


def test_each_method_is_one_of_the_accelerator() -> None:
    from accelerate import Accelerator

    methods = _first_cells("The accelerator's methods")
    assert len(methods) >= 8
    assert [name for name in methods if not hasattr(Accelerator, name)] == []
