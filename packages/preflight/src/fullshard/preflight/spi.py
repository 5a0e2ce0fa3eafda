"""Names of ``fullshard.preflight`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.preflight.commands.local_ranks import default_ranks, exit_code_of, share_cores
from fullshard.preflight.commands.results import json_text
from fullshard.preflight.pages.page import (
    Bar,
    Figure,
    PageError,
    Table,
    require_page,
    timeline_figure,
    write_page,
)
from fullshard.preflight.planning.memory.ledger import Ledger
from fullshard.preflight.planning.memory.places import Places
from fullshard.preflight.planning.memory.storages import Sharing, Storages
from fullshard.preflight.tensors import local_tensors

__all__ = [
    "Bar",
    "Figure",
    "Ledger",
    "PageError",
    "Places",
    "Sharing",
    "Storages",
    "Table",
    "default_ranks",
    "exit_code_of",
    "json_text",
    "local_tensors",
    "require_page",
    "run_command",
    "share_cores",
    "timeline_figure",
    "write_page",
]


def run_command(arguments: Sequence[str], *, prog: str, module: str) -> int:
    """Run ``doctor``, ``plan``, ``verify`` or ``races``; see ``command_line.main``."""
    # Imported here: it imports all of preflight, and ranks of a benchmark import this module.
    from fullshard.preflight.commands.command_line import main

    return main(arguments, prog=prog, module=module)
