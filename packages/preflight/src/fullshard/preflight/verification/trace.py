"""What modules did in a forward: which ran, in which dtypes, and a fingerprint of each output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.preflight.verification.names import clean
from fullshard.sharding import map_tensors

__all__ = ["Trace", "fingerprint", "traced"]

_SAMPLE = 4096


@dataclass(kw_only=True)
class Trace:
    """One forward.

    Attributes:
        outputs: per module that ran, in the order in which they ended, a fingerprint of its output.
        dtypes: the floating dtypes of parameters and outputs.
    """

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Returns two numbers of ``tensor``: the norm of a sample, and its sum with changing weights.

    Two tensors that differ have other fingerprints, but for a chance of no interest here. NaN
    counts as 0, so that a tensor that holds some has the fingerprint of its copy.
    """
    if isinstance(tensor, DTensor):  # a tensor parallel module gives it, on all of its ranks
        tensor = tensor.full_tensor()
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].to("cpu", torch.float64).nan_to_num()
    weights = torch.cos(torch.arange(sample.numel(), dtype=torch.float64))
    return torch.stack([sample.norm(), (sample * weights).sum()])


@contextmanager
def traced(model: nn.Module) -> Iterator[Trace]:
    """Notes what the modules of ``model`` do inside a ``with`` block."""
    trace = Trace()
    handles = [
        module.register_forward_hook(partial(_note, trace, clean(name)))
        for name, module in model.named_modules()
    ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _note(trace: Trace, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    prints: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            trace.dtypes.add(tensor.dtype)
            prints.append(fingerprint(tensor))
        return tensor

    map_tensors(look, output)
    own = module.parameters(recurse=False)
    trace.dtypes.update(param.dtype for param in own if param.is_floating_point())
    if name not in trace.outputs:
        trace.outputs[name] = torch.cat(prints) if prints else torch.zeros(0)
