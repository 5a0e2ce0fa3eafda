"""Names of ``fullshard.preflight`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.preflight.commands.command_line import main as run_command
from fullshard.preflight.commands.local_ranks import default_ranks, share_cores
from fullshard.preflight.pages.page import Figure, PageError, Table, write_page
from fullshard.preflight.planning.memory.ledger import Ledger
from fullshard.preflight.planning.memory.places import Places
from fullshard.preflight.planning.memory.storages import Sharing, Storages
from fullshard.preflight.tensors import local_tensors

__all__ = [
    "Figure",
    "Ledger",
    "PageError",
    "Places",
    "Sharing",
    "Storages",
    "Table",
    "default_ranks",
    "local_tensors",
    "run_command",
    "share_cores",
    "write_page",
]
