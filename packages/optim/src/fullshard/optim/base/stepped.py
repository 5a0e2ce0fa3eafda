"""The tensors of one step: a parameter's shard, its gradient's, and the state that goes with them.

Owns the checks of parameters, gradients and state before a step, all from what every rank knows, so
that ranks raise alike and before any exchange. Knows no rule of any optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.sharding.spi import (
    ShardingSpec,
    local_shard,
    make_dtensor,
    make_spec,
    owner_of,
    spec_of,
)

__all__ = ["Stepped", "described", "label_of", "stepped_in"]


def label_of(param: torch.Tensor) -> str:
    """Return the full name of a parameter that ``fully_shard`` knows, or its shape."""
    owner = owner_of(param)
    return owner.name if owner else f"a parameter of shape {tuple(param.shape)}"


@dataclass(frozen=True, slots=True)
class Stepped:
    """A parameter with a gradient.

    Attributes:
        param: the parameter in the optimizer.
        spec: how it is cut; None: a plain tensor.
        data: this rank's part of it, a plain tensor.
        gradient: this rank's part of its gradient.
        state: the parameter's state.
        options: those of its group.
        place: its number among all parameters of the optimizer.
    """

    param: torch.Tensor
    spec: ShardingSpec | None
    data: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, Any]
    options: Mapping[str, Any]
    place: int

    def like(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return zeros that are cut as the parameter, for its state; ``dtype``: None for its."""
        data = torch.zeros_like(self.data, dtype=dtype, memory_format=torch.contiguous_format)
        if self.spec is None:
            return data
        if dtype is None or dtype is self.data.dtype:
            return make_dtensor(data, self.spec)
        whole = torch.empty(self.param.shape, dtype=dtype, device="meta")
        spec = make_spec(self.spec.mesh, tuple(self.spec.placements), whole)
        return make_dtensor(data, spec)

    def wide(self) -> torch.Tensor:
        """Return what a step is added to: ``data``, or a copy in fp32 of what is narrower."""
        return self.data.float() if self.data.dtype.itemsize < 4 else self.data

    def write(self, wide: torch.Tensor) -> None:
        """Round what ``wide()`` gave, once, to the parameter."""
        if wide is not self.data:
            self.data.copy_(wide)

    def part(
        self, key: str, shape: Sequence[int] | None = None, *, plain: bool = False
    ) -> torch.Tensor:
        """Return this rank's part of the state under ``key``.

        Args:
            key: of the state.
            shape: of the whole state; None: that of the parameter.
            plain: the state is whole on every rank.

        Raises:
            RuntimeError: if it is cut otherwise than the parameter.
        """
        value, spec = self.state.get(key), None if plain else self.spec
        return _part(self.param, spec, value, f"state {key!r}", shape)


def _part(
    param: torch.Tensor,
    spec: ShardingSpec | None,
    value: Any,
    what: str,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return this rank's part of ``value``, which must match ``spec``.

    Raises:
        RuntimeError: if it is cut otherwise, or not of ``shape``, by default that of ``param``.
    """
    if isinstance(value, torch.Tensor):
        wanted = param.shape if shape is None else torch.Size(shape)
        if isinstance(value, DTensor) and spec is not None:
            found = spec_of(value)
            same = found is spec or (found.placements, found.mesh) == (spec.placements, spec.mesh)
            if same and value.shape == wanted:
                return local_shard(value)
        elif not isinstance(value, DTensor) and spec is None and value.shape == wanted:
            return value
    raise RuntimeError(
        f"{label_of(param)} is {described(param)}, but its {what} is {described(value)}; build "
        "the optimizer after fully_shard, and load its state with "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict or with "
        "fullshard.checkpoint, which cut it as the parameter is cut now"
    )


def described(tensor: Any) -> str:
    """Return what ``tensor`` is, in words: its shape, and how it is cut."""
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    if isinstance(tensor, DTensor):
        return (
            f"a DTensor of shape {tuple(tensor.shape)} placed as {tuple(tensor.placements)} on "
            f"ranks {tensor.device_mesh.mesh.tolist()}"
        )
    return f"a plain tensor of shape {tuple(tensor.shape)}"


def stepped_in(optimizer: Optimizer, group: Mapping[str, Any], first: int) -> list[Stepped]:
    """Return those parameters of ``group`` that have a gradient, in order.

    Args:
        optimizer: whose group it is.
        group: a group.
        first: the number of its first parameter among all of the optimizer.

    Raises:
        RuntimeError: if a gradient is sparse, complex, or cut otherwise than its parameter.
    """
    found = []
    for place, param in enumerate(group["params"], first):
        if param.grad is None:
            continue
        spec = spec_of(param) if isinstance(param, DTensor) else None
        data = param.detach() if spec is None else local_shard(param)
        gradient = _part(param, spec, param.grad, "gradient")
        if gradient.is_sparse or gradient.is_complex():
            raise RuntimeError(
                f"{type(optimizer).__name__} takes dense gradients of real numbers, and that of "
                f"{label_of(param)} is {gradient.layout} of {gradient.dtype}; step it with another "
                "optimizer"
            )
        found.append(Stepped(param, spec, data, gradient, optimizer.state[param], group, place))
    return found
