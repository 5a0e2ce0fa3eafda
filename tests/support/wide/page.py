"""A page of the documentation as a program: its Python blocks, in order, in one namespace."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

_HOW_TO = Path(__file__).parents[3] / "docs" / "how-to"
NEW_DEVICE = _HOW_TO / "new-device.md"
OWN_COLLECTIVE = _HOW_TO / "own-collective.md"


def run_page(
    page: Path, *, leave_out: tuple[str, ...] = (), only: int | None = None
) -> dict[str, Any]:
    """What the page's blocks define, after they ran; what they print is under ``"printed"``.

    Args:
        page: a Markdown file; its blocks fenced as ``python`` are run.
        leave_out: headings of sections that are not.
        only: how many of its blocks; None: all.

    Raises:
        ValueError: if the page lacks one of these headings or has no block.
    """
    namespace: dict[str, Any] = {"__name__": page.stem}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for code in _blocks(page, leave_out)[:only]:
            exec(compile(code, str(page), "exec"), namespace)
    namespace["printed"] = printed.getvalue()
    return namespace


def _blocks(page: Path, leave_out: tuple[str, ...]) -> list[str]:
    """Each block, moved down by empty lines, so that a traceback shows the page's lines."""
    heading, inside, headings = "", False, set()
    blocks: list[str] = []
    for number, line in enumerate(page.read_text().splitlines()):
        if line.startswith("## "):
            heading = line.removeprefix("## ")
            headings.add(heading)
        if line == "```python" and heading not in leave_out:
            inside = True
            blocks.append("\n" * (number + 1))
        elif line == "```":
            inside = False
        elif inside:
            blocks[-1] += line + "\n"
    missing = sorted(set(leave_out) - headings)
    if missing or not blocks:
        raise ValueError(f"{page} has {len(blocks)} blocks and lacks the headings {missing}")
    return blocks
