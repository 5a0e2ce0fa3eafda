"""FairScale's ``checkpoint_wrapper``: activations of a module are computed again in backward.

Owns the wrapper, which is torch's checkpointing without reentrance. The module stays what it was:
its names, and so its state dict, do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_wrapper"]


def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """Return ``module``, whose forward keeps its inputs only, for backward to compute it again.

    Statistics of batch norms count each forward once. Without gradients nothing changes.

    Args:
        module: the module; it is changed in place.
        offload_to_cpu: keep the inputs in CPU memory between forward and backward.
    """
    module.forward = _Checkpointed(module, offload_to_cpu)
    return module


class _Checkpointed:
    """A module's forward, with checkpointing around that of its class."""

    def __init__(self, module: nn.Module, offload_to_cpu: bool) -> None:
        self._module = module
        self._offload_to_cpu = offload_to_cpu

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        offloading: AbstractContextManager[Any] = nullcontext()
        if self._offload_to_cpu:
            offloading = torch.autograd.graph.save_on_cpu()
        with offloading:
            return checkpoint(
                self._plain, *args, use_reentrant=False, context_fn=self._contexts, **kwargs
            )

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._module).forward(self._module, *args, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(self._module)


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    """Inside, batch norms under ``module`` count into copies of their statistics."""
    kept = {
        each: dict(each._buffers)
        for each in module.modules()
        if isinstance(each, nn.modules.batchnorm._BatchNorm)
    }
    for each, buffers in kept.items():
        copies = {name: None if one is None else one.clone() for name, one in buffers.items()}
        each._buffers.update(copies)
    try:
        yield
    finally:
        for each, buffers in kept.items():
            each._buffers.update(buffers)
