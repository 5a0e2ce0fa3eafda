"""One tensor's running average, kept as this rank holds the tensor.

Owns the average's memory, the arithmetic of an update over many of them, and its two forms outside:
a plain tensor, or a ``DTensor`` cut as the parameter is. When there is an update is not its affair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fullshard.comm.runtime.compat import foreach_copy, foreach_lerp
from fullshard.sharding.base.compat import (
    local_shard,
    make_dtensor,
    make_spec,
    spec_of,
)
from fullshard.sharding.params.owner import owner_of

__all__ = ["Average", "update_averages"]


class Average:
    """The average of one parameter or buffer.

    Attributes:
        name: of what is averaged.
        source: what is averaged: the sharded parameter, or a plain tensor.
        value: the average of what this rank has of it.
    """

    def __init__(
        self,
        name: str,
        source: torch.Tensor,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        """Starts with a copy of the present value."""
        self.name = name
        self.source = source
        with torch.no_grad():
            self.value = self.shard.to(device or self.shard.device, dtype, copy=True)

    @property
    def shard(self) -> torch.Tensor:
        """What this rank has of the source, outside autograd."""
        return (
            local_shard(self.source) if isinstance(self.source, DTensor) else self.source.detach()
        )

    def follow(self, present: torch.Tensor) -> None:
        """Averages ``present`` from now on, which took the source's place in the model.

        Raises:
            RuntimeError: if it is another tensor than one could be averaged with the source.
        """
        if present is self.source:
            return
        if present.shape != self.source.shape or _placements(present) != _placements(self.source):
            raise RuntimeError(
                f"{self.name} was {_described(self.source)} when it was averaged first, and is "
                f"{_described(present)} now; make the averages after fully_shard, and after the "
                "model got its last shapes"
            )
        self.source = present

    def as_parameter(self) -> torch.Tensor:
        """Returns the average as the source is: a ``DTensor`` over this memory, or this memory."""
        if not isinstance(self.source, DTensor):
            return self.value
        spec = spec_of(self.source)
        like = torch.empty(self.source.shape, dtype=self.value.dtype, device="meta")
        return make_dtensor(self.value, make_spec(spec.mesh, spec.placements, like))

    def require_fits(self, given: object) -> None:
        """Returns if ``given`` has the source's shape.

        Raises:
            ValueError: if not.
        """
        if not isinstance(given, torch.Tensor) or given.shape != self.source.shape:
            shape = tuple(given.shape) if isinstance(given, torch.Tensor) else None
            raise ValueError(
                f"the state dict has {f'shape {shape}' if shape is not None else repr(given)} for "
                f"the average of {self.name}, whose shape is {tuple(self.source.shape)}"
            )

    def load(self, given: torch.Tensor) -> None:
        """Takes ``given``: cut as the source; cut otherwise, and brought together; or whole."""
        if isinstance(given, DTensor):
            same = _placements(given) == _placements(self.source)
            given = local_shard(given) if same else given.full_tensor()
            if same:
                self.value.copy_(given)
                return
        owner = owner_of(self.source)
        self.value.copy_(given if owner is None else owner.param.shard_of(given))


def _placements(tensor: torch.Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


def _described(tensor: torch.Tensor) -> str:
    where = f" with placements {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}{where}"


def update_averages(averages: Sequence[Average], decay: float) -> None:
    """Makes each average ``decay`` of itself and the rest of its source; all of that for 0."""
    alike: dict[tuple[torch.device, torch.dtype], list[Average]] = {}
    for average in averages:
        alike.setdefault((average.value.device, average.value.dtype), []).append(average)
    for (device, dtype), found in alike.items():
        values, sources = [each.value for each in found], [each.shard for each in found]
        if decay == 0 or not (dtype.is_floating_point or dtype.is_complex):
            foreach_copy(values, sources)
        else:
            foreach_lerp(values, [each.to(device, dtype) for each in sources], 1 - decay)
