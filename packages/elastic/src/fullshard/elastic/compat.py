"""Names of torchft, and what a version of torch may lack."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch.distributed as dist

__all__ = ["coordination", "end_of"]


def coordination() -> Any:
    """Return torchft's module of servers and clients; only this function imports torchft.

    Raises:
        ModuleNotFoundError: if torchft is not installed, with what to install.
    """
    os.environ.setdefault("RUST_LOG", "warn")  # else it prints lines for every step
    try:
        return importlib.import_module("torchft.coordination")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"no module named {error.name!r}; replica groups need torchft: "
            "pip install 'fullshard-elastic[torchft]'"
        ) from error


def end_of(process_group: dist.ProcessGroup) -> None:
    """Close the connections of ``process_group``, so that its ranks notice at once."""
    process_group.abort()
