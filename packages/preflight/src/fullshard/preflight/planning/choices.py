"""The choices of sharding that a plan compares, and how a model is sharded by one.

Owns what may be chosen. Refuses what a policy of one's own would do: ``plan`` takes any ``shard``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fullshard.policies import CPUOffloadPolicy, DepthPrefetch, MixedPrecisionPolicy, NoPrefetch
from fullshard.preflight.compat import tree_map
from fullshard.sharding import ShardingPlacements, fully_shard
from fullshard.sharding.spi import require_count

__all__ = [
    "Choice",
    "blocks_of",
    "call_shard",
    "recompute_units",
    "split_batch",
    "takes_mesh",
]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way to shard and train a model.

    Attributes:
        reshard: ``reshard_after_forward``: True, False, a number of ranks, or None for all but the
            root.
        prefetch: how many units are gathered ahead, in forward and in backward; None: torch's
            default.
        group: how many neighbouring units are gathered and reduced at once.
        recompute: units drop their activations and compute them again in backward.
        offload: shards, gradients and optimizer state live on the CPU, in page-locked memory.
        dtype: what is computed and gathered in; None: the parameters' own.
        reduce_dtype: what gradients are reduced in; None: ``dtype``.
        micro_batches: the batch is computed in so many equal parts, one after another.
        placements: over which axes the three kinds of state are sharded; None: the mesh's own.
    """

    reshard: bool | int | None = None
    prefetch: int | None = None
    group: int = 1
    recompute: bool = False
    offload: bool = False
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    micro_batches: int = 1
    placements: ShardingPlacements | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            TypeError: if one is no int.
            ValueError: if one is too small.
        """
        for name in ("group", "micro_batches"):
            require_count(name, getattr(self, name))
        if self.prefetch is not None and self.prefetch < 0:
            raise ValueError(f"prefetch is {self.prefetch}; pass 0 or more")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that ``fully_shard`` gets, except the mesh."""
        options: dict[str, Any] = {}
        if self.reshard is not None:
            options["reshard_after_forward"] = self.reshard
        if self.dtype is not None or self.reduce_dtype is not None:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=self.dtype, reduce_dtype=self.reduce_dtype
            )
        if self.placements is not None:
            options["placements"] = self.placements
        if self.offload:
            options["offload_policy"] = CPUOffloadPolicy()
        if self.prefetch == 0:
            options["prefetch_policy"] = NoPrefetch()
        elif self.prefetch is not None:
            depth = self.prefetch
            options["prefetch_policy"] = DepthPrefetch(forward=depth, backward=depth)
        return options

    def shard(
        self,
        units: Callable[[nn.Module], Iterable[nn.Module]],
        model: nn.Module,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Shards the ``units`` of ``model``, in the order in which they run, then the rest."""
        found = list(units(model))
        if self.recompute:
            recompute_units(found)
        for start in range(0, len(found), self.group):
            fully_shard(found[start : start + self.group], mesh=mesh, **self.options)
        fully_shard(model, mesh=mesh, **self.options)

    def __str__(self) -> str:
        """Describe the fields that differ from their defaults."""
        words = [str(self.dtype).removeprefix("torch.")] if self.dtype is not None else []
        if self.placements is not None:
            words.append(str(self.placements))
        if self.reshard is not None:
            whole = "reshard always" if self.reshard else "keep gathered"
            kept = isinstance(self.reshard, bool)
            words.append(whole if kept else f"reshard to {self.reshard}")
        if self.prefetch is not None:
            words.append(f"prefetch {self.prefetch}")
        if self.group > 1:
            words.append(f"groups of {self.group}")
        words += [name for name in ("recompute", "offload") if getattr(self, name)]
        if self.micro_batches > 1:
            words.append(f"{self.micro_batches} micro-batches")
        return ", ".join(words) or "defaults"


def takes_mesh(shard: Callable[..., object]) -> bool:
    """Return whether a user's function that shards a model has a parameter ``mesh``."""
    return "mesh" in inspect.signature(shard).parameters


def call_shard(shard: Callable[..., Any], model: nn.Module, mesh: DeviceMesh) -> Any:
    """Shard a model by a user's function, and return what that returns."""
    return shard(model, mesh=mesh) if takes_mesh(shard) else shard(model)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Each module of each outermost ``nn.ModuleList``; the default units to shard."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return found


def recompute_units(units: Sequence[nn.Module]) -> None:
    """Make each unit drop its activations in forward and compute them again in backward."""
    for unit in units:
        unit.forward = partial(_recomputed, unit.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def split_batch(batch: Any, parts: int) -> Any:
    """Return the first of equal parts of a nest of tensors, cut in dim 0.

    Raises:
        ValueError: if a tensor has no rows, or ``parts`` do not divide them.
    """

    def first(value: Any) -> Any:
        if parts == 1 or not isinstance(value, torch.Tensor):
            return value
        if value.ndim == 0 or value.shape[0] % parts:
            raise ValueError(
                f"{parts} micro-batches do not divide a tensor of shape {tuple(value.shape)} along "
                "its first dim; choose a number that divides the rows of the batch"
            )
        return value[: value.shape[0] // parts]

    return tree_map(first, batch)
