"""Every page of the documentation can be found: in the navigation, and from the pages above it."""

from __future__ import annotations

import re
from pathlib import Path

from support.members import ROOT

DOCS = ROOT / "docs"


def _links(page: Path) -> set[Path]:
    """The pages that a page links to."""
    found = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / link).resolve() for link in found}


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    listed = sorted(re.findall(r"[\w/-]+\.md", navigation))
    assert listed == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_index_of_the_how_to_pages_links_to_each() -> None:
    index = DOCS / "how-to" / "index.md"
    pages = {page.resolve() for page in index.parent.glob("*.md")} - {index.resolve()}
    assert pages <= _links(index)


def test_the_first_pages_link_to_features_and_migration() -> None:
    for page in (DOCS / "index.md", ROOT / "README.md"):
        assert {DOCS / "features.md", DOCS / "how-to" / "from-torch.md"} <= _links(page)
