"""What of torch has no public name, here alone in this package. Seen on torch 2.13."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["copy_hooks", "default_store", "hooks_of"]

_KINDS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}


def hooks_of(param: torch.Tensor) -> list[str]:
    """Returns the kinds of hook that ``param`` has; torch offers no way to ask."""
    return [public for public, private in _KINDS.items() if getattr(param, private, None)]


def copy_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Registers the hooks of ``source`` with ``target`` too."""
    for public, private in _KINDS.items():
        for hook in (getattr(source, private, None) or {}).values():
            getattr(target, public)(hook)


def default_store() -> dist.Store:
    """Returns the store of the default process group."""
    return dist.distributed_c10d._get_default_store()
