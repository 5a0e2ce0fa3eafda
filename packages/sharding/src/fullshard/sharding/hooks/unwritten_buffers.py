"""Buffers that ``to_empty`` gave memory, and that nobody has written to since.

Owns the search for them, and the warning at the first forward. A state dict brings the values of
persistent buffers only, so those that are not persistent (the ``inv_freq`` of a rotary embedding)
keep whatever was in that memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from fullshard.sharding.base.compat import version_of

__all__ = ["note_materialised", "warn_of_unwritten"]


class _Noted(NamedTuple):
    buffer: ref[torch.Tensor]
    version: int
    content: torch.Tensor  # its bytes, on the CPU


_noted: WeakKeyDictionary[nn.Module, dict[str, _Noted]] = WeakKeyDictionary()


@contextmanager
def note_materialised(module: nn.Module) -> Iterator[None]:
    """Note the buffers under ``module`` that leave the meta device inside the block."""
    meta = [
        (each, name)
        for each in module.modules()
        for name, buffer in each.named_buffers(recurse=False)
        if buffer.is_meta and name in each._non_persistent_buffers_set
    ]
    yield
    for each, name in meta:
        buffer = each.get_buffer(name)
        if not buffer.is_meta and type(buffer) is torch.Tensor:  # a simulator has no values
            noted = _Noted(ref(buffer), version_of(buffer), _content(buffer))
            _noted.setdefault(each, {})[name] = noted


def warn_of_unwritten(modules: dict[nn.Module, str]) -> None:
    """Warn of noted buffers that are as they were; ``modules``: the names from the root."""
    found = [
        f"{module_name}.{name}" if module_name else name
        for module, module_name in modules.items()
        for name, noted in _noted.pop(module, {}).items()
        if _is_unwritten(dict(module.named_buffers(recurse=False)).get(name), noted)
    ]
    if found:
        warnings.warn(
            f"{', '.join(found)}: no code has written to these buffers since to_empty(), and no "
            "state dict has them, because they are not persistent, so their values are arbitrary; "
            "compute them again after to_empty(), as the __init__ of their modules does",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_unwritten(buffer: torch.Tensor | None, noted: _Noted) -> bool:
    return (
        buffer is not None
        and buffer is noted.buffer()
        and version_of(buffer) == noted.version
        and torch.equal(
            _content(buffer), noted.content
        )  # ``.data`` of a tensor has another version
    )


def _content(buffer: torch.Tensor) -> torch.Tensor:
    content = buffer.detach().reshape(-1).view(torch.uint8)
    return content.to("cpu", copy=True)
