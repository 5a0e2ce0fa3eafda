"""Buffers in the dtype that FairScale's mixed precision gives them.

Owns the cast, which comes once, when a module is wrapped.
"""

from __future__ import annotations

import torch
from torch import nn

from fullshard.wrappers.wrapper import Wrapper

__all__ = ["cast_buffers"]


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Cast floating-point buffers of ``module``, but those in wrappers below, to ``dtype``.

    Returns:
        The earlier dtypes, by name.
    """
    found: dict[str, torch.dtype] = {}
    below = (each for each in module.modules() if isinstance(each, Wrapper))
    inner = {sub for each in below for sub in each.modules()}
    for path, sub in module.named_modules():
        for name, buffer in sub.named_buffers(recurse=False) if sub not in inner else ():
            if buffer.is_floating_point():
                found[f"{path}.{name}" if path else name] = buffer.dtype
                sub._buffers[name] = buffer.to(dtype)
    return found
