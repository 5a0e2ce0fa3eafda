"""The tensors inside the state of one parameter: which are parts of it, and how each is cut.

Owns telling a part of a sharded tensor from a number that every rank has, the ``DTensor`` that says
so, and where the chunks of a tensor lie. It starts no collective but ``DTensor``'s own.

[Note: parts] What an optimizer of torch keeps per element of a sharded parameter is a ``DTensor``,
which says itself how it is cut. One that was written for plain tensors keeps plain ones of the
shape of the rank's shard; those are parts, too. Everything else is whole on every rank: a step
count, a row statistic, ``None``, a list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fullshard.sharding import map_tensors
from fullshard.sharding.base.compat import local_shard, make_dtensor, make_spec, spec_of

__all__ = ["Chunks", "as_cut", "as_parts", "map_state", "whole"]


def map_state(fn: Callable[[str, torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Returns a parameter's state with ``fn`` applied to each tensor and the key it is under."""
    if not isinstance(value, dict):
        return map_tensors(partial(fn, ""), value)
    return {key: map_tensors(partial(fn, str(key)), item) for key, item in value.items()}


def as_cut(param: torch.Tensor, local: torch.Tensor) -> DTensor:
    """Returns the ``DTensor`` of this rank's part ``local``, cut as ``param`` is; no copy."""
    assert isinstance(param, DTensor), "only those are cut"
    if local.dtype is param.dtype:
        return make_dtensor(local, spec_of(param))
    like = torch.empty(param.shape, dtype=local.dtype, device="meta")
    return make_dtensor(local, make_spec(param.device_mesh, tuple(param.placements), like))


def as_parts(param: torch.Tensor, value: Any) -> Any:
    """Returns the state ``value`` of ``param``, in which every part is a ``DTensor``."""
    if not isinstance(param, DTensor):
        return value
    shape = local_shard(param).shape

    def wrapped(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) or tensor.ndim == 0 or tensor.shape != shape:
            return tensor
        return as_cut(param, tensor)

    return map_tensors(wrapped, value)


def whole(tensor: DTensor) -> torch.Tensor:
    """Returns the full tensor, on the mesh's device: shards may live on the CPU. A copy.

    Every rank of the mesh calls it.
    """
    there = tensor.detach().to(tensor.device_mesh.device_type)
    assert isinstance(there, DTensor), "moving keeps the type"
    full = there.full_tensor()
    if full.untyped_storage().data_ptr() == local_shard(tensor).untyped_storage().data_ptr():
        return full.clone()  # this rank's part is all of it
    return full


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """How one tensor is cut in plain chunks over one axis of a mesh: ``torch.chunk``'s rule.

    The last ones may be shorter, or empty. In a collective all are as long as the first.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        dim: along which it is cut.
        process_group: the ranks that have the chunks; None: it is not cut, or not in plain chunks.
        index: which chunk this rank has.
    """

    shape: torch.Size
    dtype: torch.dtype
    dim: int = 0
    process_group: dist.ProcessGroup | None = None
    index: int = 0

    @classmethod
    def of(cls, param: torch.Tensor, like: torch.Tensor) -> Chunks:
        """Returns how a tensor of the shape and dtype of ``like`` is cut as ``param`` is."""
        if not isinstance(param, DTensor):
            return cls(shape=like.shape, dtype=like.dtype)
        cut = [axis for axis, placed in enumerate(param.placements) if not placed.is_replicate()]
        placed = param.placements[cut[0]] if len(cut) == 1 else None
        if type(placed) is not Shard:
            return cls(shape=like.shape, dtype=like.dtype)
        mesh, (axis,) = param.device_mesh, cut
        return cls(
            shape=like.shape,
            dtype=like.dtype,
            dim=placed.dim % like.ndim,
            process_group=mesh.get_group(axis) if mesh.size(axis) > 1 else None,
            index=mesh.get_local_rank(axis),
        )

    def rows_of(self, index: int) -> int:
        """Returns how long chunk ``index`` is along the dim."""
        count = 1 if self.process_group is None else self.process_group.size()
        longest = -(-self.shape[self.dim] // count)
        return max(0, min(longest, self.shape[self.dim] - index * longest))

    def chunk(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """Returns chunk ``index`` of ``full``: a view."""
        start = min(index * self.rows_of(0), self.shape[self.dim])
        return full.narrow(self.dim, start, self.rows_of(index))

    @property
    def longest(self) -> torch.Size:
        """The shape of the first chunk, which none exceeds."""
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return torch.Size((*before, self.rows_of(0), *after))

    def pack(self, chunk: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns ``chunk`` as bytes on ``device``, as many as the first has."""
        padded = torch.zeros(self.longest, dtype=self.dtype, device=device)
        padded.narrow(self.dim, 0, chunk.shape[self.dim]).copy_(chunk)
        return padded.view(-1).view(torch.uint8)

    def unpack(self, packed: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns the first ``rows`` of what was packed: a view."""
        return packed.view(self.dtype).view(self.longest).narrow(self.dim, 0, rows)
