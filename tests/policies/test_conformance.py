"""Policies satisfy sharding's protocols, as mypy sees it, and mypy fails when one drifts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from mypy import api

import fullshard.policies as policies
from support.members import ROOT

CONFORMANCE = Path(__file__).with_name("conformance.py")

DRIFTED = '''
"""One policy that drifted from its protocol: {what}."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.sharding import PrecisionPolicy, PrefetchPolicy, ReshardPolicy, Offload
from fullshard.policies import MixedPrecisionPolicy, NoPrefetch, OffloadPolicy, ReshardAlways


@dataclass(frozen=True)
class Drifted({base}):
    {body}


VALUE: {protocol} = Drifted()
'''

DRIFTS = {
    "another argument": ("ReshardAlways", "def after_forward(self) -> bool: return True"),
    "another name": ("object", "def after_forwards(self, is_root: bool) -> bool: return True"),
    "another type": (
        "MixedPrecisionPolicy",
        "def gathered_dtype(self, name: str, dtype: str) -> torch.dtype: return torch.float32",
    ),
    "another answer": (
        "NoPrefetch",
        "def in_forward(self, order: Sequence[str], position: int) -> int: return 1",
    ),
    "an attribute": ("OffloadPolicy", "home: int = 3"),
}
PROTOCOLS = {
    "ReshardAlways": "ReshardPolicy",
    "object": "ReshardPolicy",
    "MixedPrecisionPolicy": "PrecisionPolicy",
    "NoPrefetch": "PrefetchPolicy",
    "OffloadPolicy": "Offload",
}


def _mypy(*paths: Path) -> tuple[str, int]:
    output, errors, code = api.run(
        [
            "--config-file",
            str(ROOT / "pyproject.toml"),
            "--cache-dir",
            str(ROOT / ".mypy_cache"),
            *map(str, paths),
        ]
    )
    assert not errors, errors
    return output, code


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy says of the conforming file and of all drifted ones, in one run."""
    folder = tmp_path_factory.mktemp("drifted")
    files = []
    for number, (what, (base, body)) in enumerate(DRIFTS.items()):
        path = folder / f"drifted_{number}.py"
        path.write_text(DRIFTED.format(what=what, base=base, body=body, protocol=PROTOCOLS[base]))
        files.append(path)
    output, code = _mypy(CONFORMANCE, *files)
    assert code == 1, output
    return output


def test_every_policy_satisfies_its_protocol(checked: str) -> None:
    complaints = [line for line in checked.splitlines() if "drifted_" not in line]
    assert [line for line in complaints if ": error:" in line] == []
    assert "Found" in complaints[-1]


@pytest.mark.parametrize("number", range(len(DRIFTS)), ids=list(DRIFTS))
def test_mypy_fails_on_a_policy_that_drifted(checked: str, number: int) -> None:
    lines = [line for line in checked.splitlines() if f"drifted_{number}.py" in line]
    assignments = [
        line
        for line in lines
        if "Incompatible types in assignment" in line and 'variable has type "' in line
    ]
    assert assignments, checked


def test_every_policy_of_the_package_is_in_the_conforming_file() -> None:
    text = CONFORMANCE.read_text()
    names = [name for name in policies.__all__ if dataclasses.is_dataclass(getattr(policies, name))]
    assert names
    for name in names:
        assert f"{name}(" in text.partition("PRECISION:")[2]
