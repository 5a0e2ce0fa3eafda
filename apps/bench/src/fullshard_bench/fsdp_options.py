"""Settings for a ``fully_shard`` with torch's arguments, ours or torch's own.

Owns the translation. Refuses to know whose policies it fills in: both engines pass their own.
"""

from __future__ import annotations

from typing import Any

import torch

from fullshard_bench.errors import BenchError
from fullshard_bench.settings import Settings

__all__ = ["fsdp_options", "parse_reshard"]


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
    reshard = parse_reshard(settings.reshard)
    if reshard is not None:
        options["reshard_after_forward"] = reshard
    return options


def parse_reshard(text: str) -> bool | int | None:
    """Translate `default`, `always`, `never` or a number of ranks into ``reshard_after_forward``.

    Raises:
        BenchError: it is none of these.
    """
    named = {"default": None, "always": True, "never": False}
    if text in named:
        return named[text]
    if not text.isdecimal() or int(text) < 2:
        raise BenchError(f"--reshard {text!r}: must be {', '.join(named)} or a number above 1")
    return int(text)
