"""Figures in prose are those of the newest records; the script that shows them leaves none out."""

from __future__ import annotations

import re

from fullshard_bench.reporting.bars import BARS
from support.members import ROOT
from support.tools import load_tool

TOOL = load_tool("figures")
FOUND = TOOL.verdicts()


def test_tables_and_picture_are_what_the_script_makes_of_the_newest_records() -> None:
    for page in TOOL.PAGES:
        assert TOOL.with_table(page.read_text(), FOUND) == page.read_text(), (
            "python tools/figures.py"
        )
        assert TOOL.table(FOUND) in page.read_text()
    assert TOOL.PICTURE.read_text() == TOOL.draw(FOUND), "run python tools/figures.py"


def test_every_bar_for_a_cpu_is_shown_met_or_not() -> None:
    shown = {each.bar.what for each in FOUND}
    assert shown == {bar.what for bar in BARS if not bar.what.startswith("CUDA")}
    readme = (ROOT / "README.md").read_text()
    missed = [each for each in FOUND if each.word != "met"]
    for each in missed:
        assert f"| {each.bar.what} |" in readme and f"**{each.word}**" in readme


def test_readme_links_to_the_records_that_its_figures_are_from() -> None:
    readme = (ROOT / "README.md").read_text()
    linked = set(re.findall(r"\(benchmarks/((?:cpu-set|network)_[^)]+)\.md\)", readme))
    assert linked == {TOOL.newest(name).stem for name in ("cpu-set", "network")}


def test_no_other_page_has_ratios_to_torch_in_prose() -> None:
    for name in ("docs/how-to/benchmark.md", "docs/design.md", "docs/index.md"):
        page = (ROOT / name).read_text()
        prose = re.sub(r"<!-- figures -->.*<!-- end of figures -->", "", page, flags=re.DOTALL)
        assert not re.search(r"0\.\d+ (of|times|x) torch", prose), name
