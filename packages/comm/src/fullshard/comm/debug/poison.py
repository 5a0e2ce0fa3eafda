"""Poison: what debug mode puts where full parameters were, once their memory was given back.

Every byte is ``POISON``, which reads as NaN in all floating-point dtypes. ``check_unpoisoned``
finds it in gradients. ``same_host`` puts it where it belongs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["POISON", "check_unpoisoned"]

POISON = 0xFF
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_unpoisoned(gradients: Iterable[torch.Tensor | None], name: str) -> None:
    """Return if no gradient was computed from poison.

    Arithmetic keeps the bits of a NaN in fp32 and fp64, so the check can tell poison from other
    NaNs. Narrower dtypes round, and may lose them.

    Args:
        gradients: full gradients of this rank.
        name: the group of parameters whose gradients they are.

    Raises:
        RuntimeError: if one holds poison.
    """
    for number, gradient in enumerate(gradients):
        if gradient is None or not gradient.is_floating_point():
            continue
        bits = gradient.detach().view(_SAME_SIZE[gradient.dtype.itemsize])
        if bool((bits == -1).any()):
            raise RuntimeError(
                f"got a gradient of {name or '(root)'} (parameter {number} of the group) that was "
                "computed from full parameters after their memory was given back, where debug mode "
                "puts NaN; expected full parameters to be read only while their module is gathered."
                " Do not keep a full parameter, a view of it or a tensor over it beyond the forward"
                " that used it; to read it later, enter unsharded(module)"
            )
