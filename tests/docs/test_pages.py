"""Every page of the documentation can be found, under one name, and says what it continues."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.members import ROOT
from support.tools import load_tool

DOCS = ROOT / "docs"
INDEX = DOCS / "how-to" / "index.md"
SITE = load_tool("site")


def _links(page: Path) -> set[Path]:
    """The pages that a page links to."""
    found = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / link).resolve() for link in found}


def _title(page: Path) -> str:
    lines = page.read_text().splitlines()  # the title may follow settings of the page
    return next(line for line in lines if line.startswith("# ")).removeprefix("# ")


def _navigation() -> list[Any]:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    found: list[Any] = yaml.safe_load(text)
    return found


def _entries(items: list[Any]) -> list[tuple[str | None, str]]:
    """Label and path of each page below, in order; None where the page's title is the label."""
    found: list[tuple[str | None, str]] = []
    for item in items:
        if isinstance(item, str):
            found.append((None, item))
        else:
            for label, below in item.items():
                found += [(label, below)] if isinstance(below, str) else _entries(below)
    return found


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    elsewhere = {path for path in SITE.kept_elsewhere(ROOT).values() if path.endswith(".md")}
    assert sorted(path for _, path in _entries(_navigation())) == sorted(pages | elsewhere)


def test_the_navigation_calls_a_page_by_its_title() -> None:
    labelled = {path for label, path in _entries(_navigation()) if label is not None}
    assert {path for path in labelled if (DOCS / path).exists()} == {"index.md"}


def test_the_index_of_the_how_to_pages_has_the_groups_of_the_navigation_and_the_pages_titles() -> (
    None
):
    (groups,) = (item["How to"][1:] for item in _navigation() if "How to" in item)
    wanted = {name: pages for group in groups for name, pages in group.items()}
    shown = {
        cells[0]: re.findall(r"\[([^]]+)\]\(([\w-]+\.md)\)", cells[1])
        for line in INDEX.read_text().splitlines()
        if line.startswith("| ") and len(cells := [each.strip() for each in line.split("|")[1:3]])
    }
    assert {name: [f"how-to/{path}" for _, path in links] for name, links in shown.items() if name}
    for name, pages in wanted.items():
        assert [f"how-to/{path}" for _, path in shown[name]] == pages
        assert [words for words, _ in shown[name]] == [_title(DOCS / path) for path in pages]


def test_the_index_of_the_how_to_pages_links_to_each() -> None:
    pages = {page.resolve() for page in INDEX.parent.glob("*.md")} - {INDEX.resolve()}
    assert pages <= _links(INDEX)


def test_the_first_pages_link_to_features_and_migration() -> None:
    for page in (DOCS / "index.md", ROOT / "README.md"):
        assert {DOCS / "features.md", DOCS / "how-to" / "from-torch.md"} <= _links(page)


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_a_page_says_in_a_visible_line_what_its_programs_continue(page: Path) -> None:
    lines = [line for line in page.read_text().splitlines() if line]
    for number, line in enumerate(lines):
        continued = re.fullmatch(r"<!-- snippets: .*after=(\S+) -->", line)
        if continued:
            assert re.fullmatch(
                rf"\*Continues \[.+\]\({re.escape(continued[1])}#[\w-]+\)\.\*", lines[number - 1]
            ), f"{page}: the line above {line} names what is continued"
