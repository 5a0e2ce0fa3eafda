"""Layouts by force: tests that run with every layout set the table by which they are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fullshard.comm import DirectFrom, LayoutTable, set_layout_table, set_shared_memory

__all__ = ["LAYOUTS", "between_hosts", "layouts"]

_TABLES: dict[str, LayoutTable | None] = {
    "default": None,
    "direct": LayoutTable({"gloo/cpu": DirectFrom(gather=0, reduce=0)}),
    "packed": LayoutTable({"gloo/cpu": DirectFrom()}),
    "large ones direct": LayoutTable({"gloo/cpu": DirectFrom(gather=1 << 10, reduce=1 << 10)}),
}

LAYOUTS = ("default", "direct", "packed")
"""Names of tables, of process groups that do not share memory, with which the parity core runs."""


@contextmanager
def layouts(name: str) -> Iterator[None]:
    """What is first used inside has the layouts of the table of this name."""
    set_layout_table(_TABLES[name])
    try:
        yield
    finally:
        set_layout_table(None)


@contextmanager
def between_hosts(name: str) -> Iterator[None]:
    """As ``layouts``; ranks of one host do not share memory meanwhile."""
    set_shared_memory(False)
    try:
        with layouts(name):
            yield
    finally:
        set_shared_memory(True)
