"""Hooks of the whole run: what of a product runs, what needs a GPU, when rank processes end."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
import torch
from hypothesis import settings

from support.chosen import CHOSEN, chosen
from support.device import why_not
from support.products import mark_crosses
from support.ranks import ranks_at_pace, shutdown_pools

# A busy machine is slow now and then: no test fails for the time it takes.
settings.register_profile("fullshard", deadline=None)
settings.load_profile("fullshard")

# Each process finds out by itself which vector instructions torch is to use. One that cannot read
# what processor it is on, for want of a file descriptor say, uses none and goes on, and what it
# draws and computes has other last bits than the others'. So all are told what this one has found.
os.environ["ATEN_CPU_CAPABILITY"] = torch.backends.cpu.get_cpu_capability().lower()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the command line choose seeds, and the accelerator; see ``support.card``."""
    parser.addoption("--seeds", default=None, help="START:END, or one seed, for the fuzz test")
    parser.addoption(
        "--device",
        choices=("cuda", "async"),
        default="cuda",
        help="the accelerator of tests marked gpu or device",
    )
    parser.addoption(
        "--paces", type=int, default=20, help="how many draws of delays tests marked device get"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark that only `support.products` gives a meaning."""
    meaning = "cross: of its product, `tests` runs what differs from the first case in one value"
    config.addinivalue_line("markers", meaning)
    if config.getoption("--device") == "async":
        os.environ[CHOSEN] = "async"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test of the core that is marked ``device`` under several draws of delays."""
    mark = metafunc.definition.get_closest_marker("device")
    if mark is None or not mark.kwargs.get("paces") or not chosen():
        return
    metafunc.fixturenames.append("device_pace")
    paces = range(metafunc.config.getoption("--paces"))
    metafunc.parametrize("device_pace", paces, ids="pace{}".format, indirect=True)


@pytest.fixture
def device_pace(request: pytest.FixtureRequest) -> Generator[None]:
    """The delays of the asynchronous device in a test's rank processes."""
    with ranks_at_pace(request.param):
        yield


@pytest.hookimpl(tryfirst=True)  # before those marked matrix are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Find what of a product belongs to the matrix, and skip what needs a device that is not there.

    The reason of a skip is in the summary.
    """
    mark_crosses(items)
    missing = why_not() if chosen() else ""
    reasons = {
        "gpu": missing if chosen() or torch.cuda.is_available() else "torch sees no CUDA device",
        "device": missing if chosen() else "needs --device async",
    }
    for item in items:
        for mark, reason in reasons.items():
            own = item.get_closest_marker(mark)
            # A core test of another folder runs on the CPU, too.
            if own is not None and reason and not own.kwargs.get("paces"):
                item.add_marker(pytest.mark.skip(reason=f"marked {mark}: {reason}"))


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
