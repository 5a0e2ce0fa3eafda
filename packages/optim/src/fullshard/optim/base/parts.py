"""Parameters that are stepped together, apart from the others of their optimizer.

``Part`` steps them without the hooks around an optimizer's step; ``SteppedGradients`` notices
changes of their gradients afterwards. When a part is stepped is decided in ``overlapped``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.comm.spi import foreach_scale
from fullshard.optim.base.stepped import label_of
from fullshard.optim.base.wrapping import Bucket, params_of, part_of
from fullshard.sharding.spi import ShadowOptimizer, local_shard

__all__ = ["Part", "SteppedGradients"]

_SAMPLE = 16  # elements of a gradient


@dataclass(eq=False)
class Part:
    """Parameters that are stepped together.

    Attributes:
        bucket: the parameters, by the index of their group.
        optimizer: the optimizer of these alone.
        shadow: the plain tensors over the shards that are stepped.
    """

    bucket: Bucket
    optimizer: Optimizer
    shadow: ShadowOptimizer = field(default_factory=lambda: ShadowOptimizer(plain=True))

    def refresh(self, optimizer: Optimizer, bucket: Bucket) -> None:
        """Take the options and the state that ``optimizer`` has now."""
        fresh = part_of(optimizer, bucket)
        fresh.state = self.optimizer.state
        for param in params_of(bucket):
            known = optimizer.state.get(param)
            if known is None:
                fresh.state.pop(param, None)
            else:
                fresh.state[param] = known  # the same dict
        self.bucket, self.optimizer = bucket, fresh

    def step(self, scale: torch.Tensor | None) -> None:
        """Scale the gradients, unless ``scale`` is None, and step."""
        params = params_of(self.bucket)
        local = [_local(param.grad) for param in params if param.grad is not None]
        if scale is not None:
            for device, dtype in {(each.device, each.dtype) for each in local}:
                same = [each for each in local if (each.device, each.dtype) == (device, dtype)]
                foreach_scale(same, scale.to(device, dtype))
        stepped = self.shadow.begin(self.optimizer)
        _unhooked_step(type(self.optimizer))(self.optimizer if stepped is None else stepped)
        if stepped is not None:
            self.shadow.end(self.optimizer, stepped)


class SteppedGradients:
    """Gradients as they were when they were stepped, to notice later changes.

    Versions would not do: gradients of one reduction share a buffer and its version, also with
    gradients that are stepped later. So some values of each are compared.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        """Note the gradients of ``params``."""
        self._params = params
        self._gradients = [param.grad for param in params]
        self._values = _sample(self._gradients)

    def changed(self) -> str:
        """Return the names of parameters whose gradients differ now, as far as can be seen."""
        pairs = zip(self._params, self._gradients, strict=True)
        replaced = [param for param, gradient in pairs if param.grad is not gradient]
        if not replaced and not torch.equal(_sample(self._gradients), self._values):
            replaced = list(self._params)
        return ", ".join(map(label_of, replaced))


def _sample(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Return some values of each gradient as bytes, in which a NaN equals itself."""
    found = [_local(each).flatten()[:_SAMPLE].float() for each in gradients if each is not None]
    return torch.cat(found).view(torch.uint8) if found else torch.empty(0, dtype=torch.uint8)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_shard(tensor) if isinstance(tensor, DTensor) else tensor


def _unhooked_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of a class without the hooks of torch around it.

    The hooks would end the parameter generations in the middle of a backward; ``step()`` does it.
    """
    step: Any = kind.step
    unhooked: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return unhooked
