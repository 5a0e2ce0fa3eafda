"""Parameters that are stepped together, apart from the others of their optimizer.

``Part`` steps them without the hooks around an optimizer's step; ``SteppedGradients`` notices
changes of their gradients afterwards. When a part is stepped is decided in ``overlapped``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from fullshard.comm.spi import foreach_scale
from fullshard.optim.base.stepped import label_of
from fullshard.optim.base.wrapping import Bucket, params_of, part_of
from fullshard.optim.steps.shadow_optimizer import ShadowOptimizer
from fullshard.sharding.spi import local_of

__all__ = ["Part", "SteppedGradients", "scale_gradients"]

_EDGE = 64  # bytes at both ends of a gradient


@dataclass(eq=False)
class Part:
    """Parameters that are stepped together.

    Attributes:
        bucket: the parameters, by the index of their group.
        optimizer: the optimizer of these alone.
        shadow: the plain tensors over the shards that are stepped.
        options: those of each group, as they are stepped.
    """

    bucket: Bucket
    optimizer: Optimizer
    shadow: ShadowOptimizer = field(default_factory=lambda: ShadowOptimizer(plain=True))
    options: list[dict[str, Any]] = field(default_factory=list)

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
        self.options = [_copied_options(optimizer.param_groups[index]) for index in bucket]

    def changed_options(self, optimizer: Optimizer) -> set[str]:
        """Return the names of options that differ in ``optimizer`` from those that are stepped."""
        groups = [_copied_options(optimizer.param_groups[index]) for index in self.bucket]
        pairs = zip(self.options, groups, strict=True)
        return {
            name
            for stepped, group in pairs
            for name, value in stepped.items()
            if not _is_same(value, group.get(name))
        }

    def step(self, scale: torch.Tensor | None) -> None:
        """Scale the gradients, unless ``scale`` is None, and step."""
        if scale is not None:
            scale_gradients(params_of(self.bucket), scale)
        stepped = self.shadow.begin(self.optimizer)
        _unhooked_step(type(self.optimizer))(self.optimizer if stepped is None else stepped)
        if stepped is not None:
            self.shadow.end(self.optimizer, stepped)


class SteppedGradients:
    """Gradients as they were when they were stepped, to notice later changes.

    Versions of tensors are no help: gradients of one reduction share a buffer and its version, also
    with gradients that are stepped later. So a digest of each gradient is compared.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        """Note the gradients of ``params``."""
        self._params = params
        self._gradients = [param.grad for param in params]
        self._digests = list(map(_digest, self._gradients))

    def changed(self) -> str:
        """Return the names of parameters whose gradients differ now."""
        noted = zip(self._params, self._gradients, self._digests, strict=True)
        changed = [
            param
            for param, gradient, digest in noted
            if param.grad is not gradient or not torch.equal(_digest(gradient), digest)
        ]
        return ", ".join(map(label_of, changed))


def _digest(gradient: torch.Tensor | None) -> torch.Tensor:
    """Return bytes that differ if an element of ``gradient`` differs; a NaN equals itself.

    These are the bytes at both ends, and the sum of all words of 8 bytes between them: one read of
    the gradient, without a copy. Only changes that cancel to the bit are not seen.
    """
    if gradient is None:
        return torch.empty(0, dtype=torch.uint8)
    data = local_of(gradient).flatten().view(torch.uint8)
    if data.numel() <= 2 * _EDGE:
        return data.clone()
    start = -data.storage_offset() % 8
    words = data[start : start + (data.numel() - start) // 8 * 8].view(torch.int64)
    return torch.cat([data[:_EDGE], data[-_EDGE:], words.sum().view(1).view(torch.uint8)])


def scale_gradients(params: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiply the gradients of ``params`` by ``scale``."""
    local = [local_of(param.grad) for param in params if param.grad is not None]
    for device, dtype in {(each.device, each.dtype) for each in local}:
        same = [each for each in local if (each.device, each.dtype) == (device, dtype)]
        foreach_scale(same, scale.to(device, dtype))


def _copied_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group, which keep their values when a tensor changes in place."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)


def _unhooked_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of a class without the hooks of torch around it.

    The hooks would end the parameter generations in the middle of a backward; ``step()`` does it.
    """
    step: Any = kind.step
    unhooked: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return unhooked
