"""Code that the state dicts of both wrappers share: clean names, and where hooks go.

Defines no hook for the content of a state dict: each wrapper has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fullshard.wrappers.ignored_states import WRAPPED

__all__ = ["PART", "attach_hooks"]

PART = f"{WRAPPED}."
"""What a wrapper puts into the names of what it wraps."""


def attach_hooks(
    wrapper: nn.Module, after_save: Callable[..., None], before_load: Callable[..., None]
) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of ``wrapper`` end and begin with these."""
    nn.Module.register_state_dict_post_hook(wrapper, after_save)
    nn.Module.register_load_state_dict_pre_hook(wrapper, before_load)
    nn.Module.register_load_state_dict_post_hook(wrapper, _clean_keys)


def _clean_keys(module: nn.Module, incompatible: Any) -> None:
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [key.replace(PART, "") for key in keys]
