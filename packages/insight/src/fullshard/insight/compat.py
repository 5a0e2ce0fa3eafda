"""Private names of torch (2.11 to 2.15) that this package uses, each with the reason."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["may_hook_saved_tensors"]


def may_hook_saved_tensors(own: type) -> bool:
    """Return whether hooks on saved tensors may be pushed now.

    Only the hooks pushed last see a tensor. Hooks of checkpointing or of a user therefore stay on
    top, unless they are methods of ``own``. Transforms of ``torch.func`` refuse hooks
    (``_saved_tensors_hooks_is_enabled``, ``_top_saved_tensors_default_hooks``).
    """
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    top = autograd._top_saved_tensors_default_hooks(False)
    return top is None or isinstance(getattr(top[0], "__self__", None), own)
