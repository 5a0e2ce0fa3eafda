"""Commands whose options belong to another package: their words are passed on as they are."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn

__all__ = ["run_app", "run_preflight"]

_INSTALL = {"fullshard_train": "./apps/train", "fullshard_bench": "./apps/bench"}


def run_preflight(command: str, words: Sequence[str]) -> int:
    """Run a command of ``fullshard.preflight``, and return its exit code.

    Programs of the user may import ``fully_shard`` of torch: they get fullshard's.
    """
    from fullshard.preflight.spi import run_command

    with ExitStack() as undo:
        if command != "doctor" and not {"-h", "--help"} & set(words):
            from fullshard.wrappers.spi import install, uninstall

            install()
            undo.callback(uninstall)
        return run_command([command, *words], prog="fullshard", module="fullshard.cli")


def run_app(module: str, words: Sequence[str], prog: str) -> NoReturn:
    """Run an app, if it is installed, and leave with its exit code; else leave with 2."""
    if importlib.util.find_spec(module) is None:
        name = module.replace("_", "-")
        sys.stderr.write(
            f"error: {name} is not installed; from a checkout: pip install ./packages/* "
            f"{_INSTALL[module]}\n"
        )
        raise SystemExit(2)
    importlib.import_module(f"{module}.cli").run(list(words), prog=prog)
    raise AssertionError("an app leaves by itself")
