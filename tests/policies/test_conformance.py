"""Every policy stands in the file by which ``nox -s types`` compares it with its protocol."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fullshard.policies as policies

CONFORMANCE = Path(__file__).with_name("conformance.py")


def test_every_policy_of_the_package_is_in_the_conforming_file() -> None:
    text = CONFORMANCE.read_text()
    found = set(policies.__all__) - {"FileOffloadStatistics"}  # figures, not a policy
    names = [name for name in found if dataclasses.is_dataclass(getattr(policies, name))]
    assert names
    for name in names:
        assert f"{name}(" in text.partition("PRECISION:")[2].partition("class ")[0]
