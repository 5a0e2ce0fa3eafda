"""What of torch has no public name, here alone in this package. Seen on torch 2.13."""

from __future__ import annotations

import torch

__all__ = ["hooks_of"]


def hooks_of(param: torch.Tensor) -> list[str]:
    """Returns the kinds of hook that ``param`` has; torch offers no way to ask."""
    kinds = {
        "register_hook": "_backward_hooks",
        "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
    }
    return [public for public, private in kinds.items() if getattr(param, private, None)]
