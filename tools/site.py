"""A MkDocs hook: pages that are kept elsewhere in the repository, and the renderer of diagrams.

Owns what makes the site whole without a network and without copies. The changelog, the benchmark's
records, the examples and the apps' READMEs become pages, and links that lead out of ``docs/`` in
the repository lead to these pages. Names of tests in the table of features are folded. Below each
stop of the page that follows a step is the source of the function. A page with a diagram loads the
renderer that is kept in ``docs/assets``: without it the theme would fetch one, and where it cannot,
the page's search fails with it. A page that loads a script or a style from elsewhere is a warning,
which fails a strict build.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "RENDERER",
    "fetched",
    "folded",
    "kept_elsewhere",
    "on_files",
    "on_page_markdown",
    "on_post_page",
    "rewritten",
    "with_renderer",
    "with_sources",
]

RENDERER = "assets/mermaid.tiny.js"
_LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)")
_FETCHED = re.compile(r"<(?:script|link)\b[^>]*\b(?:src|href)=\"?(https?:[^\"\s>]+)")
_BUNDLE = re.compile(r"<script src=\"?[^\" >]*assets/javascripts/bundle")
_STOP = re.compile(r"(?m)^\d+\. `([\w/]+)\.py:([\w.]+)`.*$")
_SHOWN = (  # the docstring is in the source
    "{show_source: true, show_root_heading: false, show_root_toc_entry: false, "
    "show_docstring_description: false, show_docstring_parameters: false, "
    "show_docstring_returns: false, show_docstring_raises: false}"
)
_OPEN = '<details open class="mkdocstrings-source"'
_log = logging.getLogger("mkdocs.hooks.site")


def kept_elsewhere(root: Path) -> dict[str, str]:
    """Return the files outside ``docs/`` that the site shows: repository path to site path.

    The benchmark's records are the newest of each suite.
    """
    shown = {"CHANGELOG.md": "changelog.md", "benchmarks/notes.md": "benchmarks/notes.md"}
    shown |= {f"apps/{app}/README.md": f"apps/{app}.md" for app in ("train", "bench")}
    newest: dict[str, Path] = {}
    for report in sorted((root / "benchmarks").glob("*_*_*.md"), key=_created):
        newest[report.stem.partition("_")[0]] = report
    for workload, report in newest.items():
        shown[f"benchmarks/{report.name}"] = f"benchmarks/{workload}.md"
    for file in (root / "examples").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            path = file.relative_to(root).as_posix()
            shown[path] = path.replace("README.md", "index.md")
    return shown


def _created(report: Path) -> str:
    """When what a report tells of was measured."""
    return str(json.loads(report.with_suffix(".json").read_text())["created"])


def rewritten(text: str, source: str, shown: Mapping[str, str]) -> str:
    """The Markdown of a page, with its links as the site needs them.

    Args:
        text: the page.
        source: its path in the repository.
        shown: what `kept_elsewhere` says. Of a link to what the site does not have, only the words
            stay.
    """
    here = posixpath.dirname(_in_site(source, shown) or "")

    def lead(found: re.Match[str]) -> str:
        picture, words, path, anchor = found[1], found[2], found[3], found[4] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target.startswith("docs/") and source.startswith("docs/"):
            return found[0]
        in_site = _in_site(target, shown)
        if in_site is None:
            return words
        return f"{picture}[{words}]({posixpath.relpath(in_site, here or '.')}{anchor})"

    return _LINK.sub(lead, text)


def _in_site(path: str, shown: Mapping[str, str]) -> str | None:
    """Where the site has a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else shown.get(path)


def folded(text: str) -> str:
    """The table of features with each cell of tests' names folded."""

    def fold(found: re.Match[str]) -> str:
        count = found[1].count("`tests/")
        summary = f"{count} test" + ("s" if count > 1 else "")
        return f"| <details><summary>{summary}</summary>{found[1]}</details> |"

    return re.sub(r"(?m)\| (`tests/[^|\n]*`) \|$", fold, text)


def with_sources(text: str) -> str:
    """A page that follows a step, with the source of each stop below it."""

    def show(found: re.Match[str]) -> str:
        name = f"fullshard.{found[1].replace('/', '.')}.{found[2]}"
        return f"{found[0]}\n\n    ::: {name}\n        options: {_SHOWN}\n"

    return _STOP.sub(show, text)


def with_renderer(html: str, page_url: str) -> str:
    """A page's HTML; one with a diagram loads the renderer before the theme looks for one."""
    if 'class="mermaid"' not in html:
        return html
    folder = page_url if page_url.endswith("/") else posixpath.dirname(page_url)
    script = f'<script src="{posixpath.relpath(RENDERER, folder or ".")}"></script>'
    return _BUNDLE.sub(lambda found: script + found[0], html, count=1)


def fetched(html: str) -> Iterator[str]:
    """Yields the address of each script and style that a page would load over the network."""
    yield from (found for found in _FETCHED.findall(html) if "/fullshard.example/" not in found)


def on_files(files: Any, config: Any) -> Any:
    """Adds the files from outside ``docs/``; called by MkDocs."""
    from mkdocs.structure.files import File  # only the environment of the docs has it

    root = Path(config["config_file_path"]).parent
    for path, in_site in kept_elsewhere(root).items():
        files.append(File.generated(config, in_site, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrites links that lead out of ``docs/``; called by MkDocs."""
    shown = kept_elsewhere(Path(config["config_file_path"]).parent)
    sources = {in_site: path for path, in_site in shown.items()}
    in_site = page.file.src_uri
    if in_site == "features.md":
        markdown = folded(markdown)
    if in_site in ("concepts/reading-one-step.md", "concepts/shared-memory.md"):
        markdown = with_sources(markdown)
    return rewritten(markdown, sources.get(in_site, f"docs/{in_site}"), shown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Adds the renderer, and warns of what the page would fetch; called by MkDocs."""
    for address in fetched(output):
        _log.warning("%s would load %s", page.file.src_uri, address)
    output = output.replace('<details class="mkdocstrings-source"', _OPEN)
    return with_renderer(output, page.url)
