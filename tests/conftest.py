"""Hooks of the whole run: what of a product runs, what needs a GPU, when rank processes end."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
import torch
from hypothesis import settings

from support.products import mark_crosses
from support.ranks import shutdown_pools

# A busy machine is slow now and then: no test fails for the time it takes.
settings.register_profile("fullshard", deadline=None)
settings.load_profile("fullshard")

# Each process finds out by itself which vector instructions torch is to use. One that cannot read
# what processor it is on, for want of a file descriptor say, uses none and goes on, and what it
# draws and computes has other last bits than the others'. So all are told what this one has found.
os.environ["ATEN_CPU_CAPABILITY"] = torch.backends.cpu.get_cpu_capability().lower()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``--seeds 0:1000`` choose what ``tests/parity/test_fuzz.py`` draws."""
    parser.addoption("--seeds", default=None, help="START:END, or one seed, for the fuzz test")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark that only `support.products` gives a meaning."""
    meaning = "cross: of its product, `tests` runs what differs from the first case in one value"
    config.addinivalue_line("markers", meaning)


@pytest.hookimpl(tryfirst=True)  # before those marked matrix are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Find what of a product belongs to the matrix, and skip what needs a GPU where there is none.

    The reason of a skip is in the summary.
    """
    mark_crosses(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="marked gpu, and torch sees no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Keep torch and some thousand collected tests out of each later garbage collection."""
    _set_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """After each file, keep what it has left out of each later garbage collection, too.

    Modules that were imported and what is cached grow to a million objects. Who collects garbage,
    as each plan does, would look through them each time: for longer than the plan takes.
    """
    yield
    if nextitem is None or nextitem.path != item.path:
        _set_aside()


def _set_aside() -> None:
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """End the pools of rank processes when the run is over, however it went."""
    shutdown_pools()
