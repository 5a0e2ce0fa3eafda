"""Each line that installs from a checkout names every layer that it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.members import MEMBERS, ROOT

PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.*")]
LINES = sorted(
    {
        (str(page.relative_to(ROOT)), line.strip())
        for page in PAGES
        for line in re.findall(r"pip install (\./(?:packages|apps)/[^`#\n\"]*)", page.read_text())
    }
)


def _members(line: str) -> set[Path]:
    """The folders that a line names."""
    words = [word for word in line.split() if word.startswith("./")]
    return {folder for word in words for folder in ROOT.glob(word) if folder.is_dir()}


def test_there_are_lines() -> None:
    assert len(LINES) > 5


@pytest.mark.parametrize(("page", "line"), LINES, ids=lambda value: value)
def test_a_line_needs_no_layer_from_a_package_index(page: str, line: str) -> None:
    named = {member.name: member for member in MEMBERS if member.folder in _members(line)}
    assert named, f"{page}: {line} names no member"
    wanted = {
        requirement.partition("==")[0]
        for member in named.values()
        for requirement in member.metadata["dependencies"]
        if requirement.startswith("fullshard")
    }
    assert wanted <= named.keys(), f"{page}: {line} lacks {sorted(wanted - named.keys())}"
