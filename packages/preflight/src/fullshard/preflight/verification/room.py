"""Where the unsharded model fits: the device of the sharded model, the CPU, or neither."""

from __future__ import annotations

import os

import torch
from torch import nn

from fullshard.preflight.machine import usable_device
from fullshard.preflight.wording import size_text

__all__ = ["has_room", "nbytes", "reference_device"]

COPIES = 4
"""Parameters, gradients, and two numbers per parameter for an optimizer like Adam."""
COPIES_OF_STEP = 9
"""The same twice, to begin each rank's batch alike, and a sum of gradients."""


def reference_device(
    model: nn.Module,
    home: torch.device,
    what: str = "the unsharded model",
    copies: int = COPIES,
) -> torch.device:
    """Return ``home`` if it has room to train a reference like ``model``, and otherwise the CPU.

    Raises:
        MemoryError: if neither has room for ``copies`` times the parameters; ``what`` is the
            model's name in its message.
    """
    wanted = copies * nbytes(model)
    cpu = torch.device("cpu")
    for device in dict.fromkeys((home, cpu)):
        if wanted <= free_memory(device):
            return device
    raise MemoryError(
        f"{what} takes {size_text(wanted)} to train (parameters, gradients, two numbers of an "
        f"optimizer each); {home} has {size_text(free_memory(home))} free and the CPU "
        f"{size_text(free_memory(cpu))}. Pass a build_model of less depth or width: what goes "
        "wrong in the large model does so in a small one"
    )


def has_room(model: nn.Module) -> bool:
    """Return whether a reference like ``model`` can train here, on the accelerator or the CPU."""
    devices = (torch.device("cpu"), usable_device())
    return any(COPIES * nbytes(model) <= free_memory(each) for each in devices)


def nbytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, on the meta device too."""
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


def free_memory(device: torch.device) -> int:
    """Return how many bytes are free on ``device``."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
