"""The hook of the site: pages from elsewhere, their links, and diagrams without a network."""

from __future__ import annotations

import re

from support.members import ROOT
from support.tools import load_tool

SITE = load_tool("site")
SHOWN = {"CHANGELOG.md": "changelog.md", "benchmarks/cpu-set_x_2026.md": "benchmarks/cpu-set.md"}


def test_links_out_of_the_docs_lead_to_the_pages_of_the_site() -> None:
    text = "[all](../../CHANGELOG.md#new) and [a record](../../benchmarks/cpu-set_x_2026.md)"
    assert SITE.rewritten(text, "docs/how-to/benchmark.md", SHOWN) == (
        "[all](../changelog.md#new) and [a record](../benchmarks/cpu-set.md)"
    )


def test_links_into_the_docs_lead_to_them_from_pages_that_are_kept_elsewhere() -> None:
    text = "[a tutorial](docs/tutorial.md), [the licence](LICENSE), [elsewhere](https://semver.org)"
    assert SITE.rewritten(text, "CHANGELOG.md", SHOWN) == (
        "[a tutorial](tutorial.md), the licence, [elsewhere](https://semver.org)"
    )


def test_links_within_the_docs_stay() -> None:
    text = "![A picture](plan-time.png) of [a plan](how-to/plan.md#time), [here](#time)"
    assert SITE.rewritten(text, "docs/tutorial-plan.md", SHOWN) == text


def test_the_newest_record_of_each_suite_is_shown() -> None:
    shown = SITE.kept_elsewhere(ROOT)
    reports = {path: page for path, page in shown.items() if re.search(r"_\d{4}-.*\.md$", path)}
    assert {"benchmarks/cpu-set.md", "benchmarks/network.md"} <= set(reports.values())
    for path, page in reports.items():
        workload = page.removeprefix("benchmarks/").removesuffix(".md")
        dates = [each.stem[-10:] for each in (ROOT / "benchmarks").glob(f"{workload}_*.md")]
        assert path.removesuffix(".md").endswith(max(dates))


def test_only_a_page_with_a_diagram_loads_the_renderer_and_before_the_theme_does() -> None:
    bundle = '<script src="../../assets/javascripts/bundle.1.min.js"></script>'
    plain = f"<body>{bundle}</body>"
    assert SITE.with_renderer(plain, "concepts/states/") == plain
    drawn = SITE.with_renderer(f'<pre class="mermaid"></pre>{bundle}', "concepts/states/")
    assert re.search(rf'src="../../{re.escape(SITE.RENDERER)}"></script>{re.escape(bundle)}', drawn)
    home = SITE.with_renderer(f'<pre class="mermaid"></pre>{bundle}', "")
    assert f'src="{SITE.RENDERER}"' in home
    assert (ROOT / "docs" / SITE.RENDERER).is_file()


def test_what_a_page_would_fetch_is_found_and_links_are_not() -> None:
    page = '<script src="https://far.example/x.js"></script><a href="https://far.example">x</a>'
    assert list(SITE.fetched(page)) == ["https://far.example/x.js"]


def test_names_of_tests_are_folded_in_every_row_of_the_table_of_features() -> None:
    text = (ROOT / "docs" / "features.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`tests/" in line]
    folded = [line for line in SITE.folded(text).splitlines() if "<details>" in line]
    assert len(folded) == len(rows) > 100
    for row, line in zip(rows, folded, strict=True):
        assert re.sub(r"<details><summary>\d+ tests?</summary>|</details>", "", line) == row
        assert f"<summary>{row.count('`tests/')} test" in line


def test_search_in_files_loads_nothing_from_elsewhere() -> None:
    """The offline plugin takes a shim of this name for its own, and would fetch it otherwise."""
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "\n  - offline" in settings
    (shim,) = re.findall(r"polyfills: \[(assets/iframe-worker[\w.]*)\]", settings)
    assert (ROOT / "docs" / shim).is_file()


def test_the_page_of_errors_is_in_front_of_others_in_a_search() -> None:
    assert (ROOT / "docs/how-to/errors.md").read_text().startswith("---\nsearch:\n  boost: ")
