"""Metadata of the tensors of an inference engine, which every rank knows without communication.

``ParamMeta``, ``Shard`` and ``Replicate`` have the fields of vLLM's classes of these names. Where
vLLM is installed, vLLM's own classes are used: its engines compare with them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Classes", "ParamMeta", "Replicate", "Shard", "classes"]

_VLLM = "vllm.distributed.weight_transfer.base"


@dataclass(frozen=True)
class Replicate:
    """Marks an axis of a mesh: its ranks hold equal copies."""


@dataclass(frozen=True)
class Shard:
    """Marks an axis of a mesh: its ranks hold the chunks of a dim, as ``torch.chunk`` cuts them.

    Attributes:
        dim: of the tensor.
    """

    dim: int


@dataclass(frozen=True)
class ParamMeta:
    """Name, dtype, shape and layout of a tensor of the engine.

    Attributes:
        name: in the engine.
        dtype: in which it travels.
        shape: of the whole tensor.
        owners: the global ranks that have a part, in the order of their mesh; None: all ranks.
        mesh_shape: of the mesh of the owners.
        placements: a ``Shard`` or ``Replicate`` for each axis of that mesh; where several cut one
            dim, the first axis cuts first. None: ``iter_local`` gives each owner the whole tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Classes:
    """The classes in which metadata is written.

    Attributes:
        meta: ``ParamMeta``, or vLLM's.
        shard: ``Shard``, or vLLM's.
        replicate: ``Replicate``, or vLLM's.
        source: vLLM's ``WeightSource``, of which a source is a subclass; None without vLLM.
    """

    meta: Any = ParamMeta
    shard: Any = Shard
    replicate: Any = Replicate
    source: Any = None

    def placements(self, dims: tuple[int | None, ...]) -> tuple[Any, ...] | None:
        """Return the placements over axes that cut ``dims``; None if no axis cuts any."""
        if all(dim is None for dim in dims):
            return None
        return tuple(self.replicate() if dim is None else self.shard(dim) for dim in dims)


@functools.cache
def classes() -> Classes:
    """Return vLLM's classes where a vLLM that has them is installed, and ours elsewhere."""
    try:
        theirs = importlib.import_module(_VLLM)
        found: Mapping[str, Any] = vars(theirs)
        return Classes(
            meta=found["ParamMeta"],
            shard=found["Shard"],
            replicate=found["Replicate"],
            source=found["WeightSource"],
        )
    except (ImportError, KeyError):  # not installed, or before these classes
        return Classes()
