"""The table of features is complete, and every test that it names exists."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from functools import cache

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp

from fullshard.sharding import FSDPModule
from support.members import ROOT

PAGE = ROOT / "docs" / "features.md"
_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: what it is about, what ours is, and the tests that it names.

    Attributes:
        section: the heading above it.
        feature: the first cell.
        ours: the second.
        shown_by: the third.
    """

    section: str
    feature: str
    ours: str
    shown_by: str

    def names(self) -> set[str]:
        return set(re.findall(r"`([\w.]+)`", self.feature))

    def tests(self) -> list[tuple[str, str]]:
        return _ID.findall(self.shown_by)


def _rows() -> list[Row]:
    rows, section = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").replace("`", "")
        elif line.startswith("| `") or (line.startswith("| ") and "::" in line):
            feature, ours, shown_by = (cell.strip() for cell in line.strip("|").split(" | "))
            rows.append(Row(section=section, feature=feature, ours=ours, shown_by=shown_by))
    return rows


ROWS = _rows()


def _named_under(section: str) -> set[str]:
    return set().union(*(row.names() for row in ROWS if row.section == section))


def _methods(cls: type) -> set[str]:
    found = inspect.getmembers(cls, inspect.isfunction)
    return {name for name, _ in found if name[0] != "_" and not hasattr(torch.nn.Module, name)}


@cache
def _tests_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_line_of_a_table_is_read() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    sections = {row.section for row in ROWS}
    assert len(lines) == len(ROWS) + 2 * len(sections)  # two lines of each are its head
    assert len({(row.section, row.feature) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row.feature).strip("-"))
def test_each_row_says_what_ours_is_and_names_tests_that_exist(row: Row) -> None:
    assert row.ours
    assert row.tests()
    assert _ID.sub("", row.shown_by).replace("<br>", "") == ""  # nothing but names of tests
    missing = [f"{path}::{name}" for path, name in row.tests() if name not in _tests_of(path)]
    assert not missing
    assert all(name.startswith("test_") for _, name in row.tests())


def test_every_argument_of_torchs_fully_shard_has_a_row() -> None:
    arguments = set(inspect.signature(torch_fsdp.fully_shard).parameters)
    assert arguments <= _named_under("Arguments of fully_shard")


def test_every_method_of_torchs_module_has_a_row_and_each_row_is_a_method_of_ours() -> None:
    named = _named_under("Methods of FSDPModule")
    assert _methods(torch_fsdp.FSDPModule) <= named <= _methods(FSDPModule)


def test_every_method_that_is_ours_alone_has_a_row() -> None:
    everywhere = set().union(*(row.names() for row in ROWS))
    assert _methods(FSDPModule) <= everywhere


def test_every_name_that_torch_exports_has_a_row() -> None:
    names = importlib.import_module("torch.distributed.fsdp._fully_shard").__all__
    assert set(names) <= _named_under("Functions and classes")


def test_every_field_of_torchs_policies_has_a_row() -> None:
    kinds = ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy", "DataParallelMeshDims")
    fields = {
        f"{kind}.{field.name}"
        for kind in kinds
        if hasattr(torch_fsdp, kind)
        for field in dataclasses.fields(getattr(torch_fsdp, kind))
    }
    assert fields <= _named_under("Fields of policies")


FSDP1 = torch_fsdp.FullyShardedDataParallel


def test_every_argument_of_fsdp1_has_a_row() -> None:
    arguments = set(inspect.signature(FSDP1.__init__).parameters) - {"self"}
    fields = {
        f"MixedPrecision.{field.name}" for field in dataclasses.fields(torch_fsdp.MixedPrecision)
    }
    assert arguments | fields <= _named_under("Arguments of FullyShardedDataParallel")


def test_every_method_of_fsdp1_has_a_row() -> None:
    named = _named_under("Methods of FullyShardedDataParallel")
    own = {name for name in vars(FSDP1) if name[0] != "_"}
    assert own <= named | {"named_modules"}


@pytest.mark.parametrize("name", ["set_symm_mem_for_comm", "set_separate_reduce_scatter_group"])
def test_what_only_several_gpus_can_show_is_marked(name: str) -> None:
    (row,) = [row for row in ROWS if name in row.names()]
    assert "not measured" in row.ours
