"""What settings mean for a ``fully_shard`` with torch's arguments, ours or torch's own.

Owns the translation. Refuses to know whose policies it fills in: both sides hand in theirs.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard_bench.settings import Settings

__all__ = ["fsdp_options"]


def fsdp_options(
    settings: Settings, device: torch.device, precision: Any, offload: Any
) -> dict[str, Any]:
    """The keyword arguments that both sides take, except the mesh.

    Args:
        settings: of the run.
        device: where the model computes.
        precision: the side's ``MixedPrecisionPolicy``.
        offload: its ``CPUOffloadPolicy``.
    """
    options: dict[str, Any] = {}
    if settings.dtype != "float32" or settings.reduce_dtype != settings.dtype:
        options["mp_policy"] = precision(
            param_dtype=getattr(torch, settings.dtype),
            reduce_dtype=getattr(torch, settings.reduce_dtype),
        )
    if settings.offload:
        options["offload_policy"] = offload(pin_memory=device.type == "cuda")
    if settings.reshard != "default":
        named = {"always": True, "never": False}
        options["reshard_after_forward"] = (
            named[settings.reshard] if settings.reshard in named else int(settings.reshard)
        )
    return options
