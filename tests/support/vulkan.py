"""The device ``vulkan`` of torchvulkan: what tests on it need.

Import nothing of torchvulkan here: the package adds a device to every process that imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

__all__ = ["is_installed", "streams_for_torch", "vulkan"]


def is_installed() -> bool:
    """Return whether torchvulkan is installed."""
    return importlib.util.find_spec("torchvulkan") is not None


def vulkan() -> Any:
    """Add the device to this process, and return its module."""
    return importlib.import_module("torchvulkan")


class _Stream:
    """The one queue of the device, as a stream that nobody has to wait for."""

    def __init__(self, *given: object, **named: object) -> None:
        self.device = torch.device("vulkan", 0)

    def record_event(self, event: object = None) -> object:
        return event or _Event()

    def _nothing(self, *given: object) -> None:
        """Order nothing: the queue is in order."""

    wait_event = wait_stream = _nothing

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *given: object) -> None:
        pass


class _Event:
    """A point in the one queue."""

    def __init__(self, *given: object, **named: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    wait = record


@contextmanager
def streams_for_torch() -> Iterator[None]:
    """Give the device streams that do nothing: torch's own ``fully_shard`` needs streams."""
    queue = _Stream()

    def current(device: object = None) -> _Stream:
        return queue

    def within(stream: _Stream) -> _Stream:
        return stream

    names: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": current,
        "stream": within,
    }
    with patch.multiple(vulkan(), create=True, **names):
        yield
