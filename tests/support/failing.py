"""Errors on purpose, in the forward of a module or in the backward that begins at its output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn


class Planned(Exception):
    """The error that a test raises on purpose."""


def fail(*_: object) -> None:
    """A hook that raises."""
    raise Planned


def fail_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    """A forward hook after which the backward of the output raises."""
    output.register_hook(fail)


@contextmanager
def failing(module: nn.Module, *, backward: bool = False) -> Iterator[None]:
    """A block that must raise: the forward of ``module`` does, or the backward of its output."""
    handle = module.register_forward_hook(fail_in_backward if backward else fail)
    try:
        with pytest.raises(Planned):
            yield
    finally:
        handle.remove()
