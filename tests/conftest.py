"""Hooks of the whole test run: GPU tests need a GPU, the rank processes end with the run."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings

from support.ranks import shutdown_pools

# A busy machine is slow now and then: no test fails for the time it takes.
settings.register_profile("fullshard", deadline=None)
settings.load_profile("fullshard")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ``--seeds 0:1000`` choose what ``tests/parity/test_fuzz.py`` draws."""
    parser.addoption("--seeds", default=None, help="START:END, or one seed, for the fuzz test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu``, with the reason in the summary, where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="marked gpu, and torch sees no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Keep torch and some thousand collected tests out of each later garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """End the pools of rank processes when the run is over, however it went."""
    shutdown_pools()
