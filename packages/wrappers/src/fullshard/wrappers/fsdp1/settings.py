"""The options of an FSDP1 user (strategy, precision, offload, prefetch) as options here.

Owns the enums and dataclasses, with the names, fields and defaults of PyTorch's FSDP1, and the
policies and arguments of ``fully_shard`` that each stands for. This file changes no module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.policies import CPUOffloadPolicy, DepthPrefetch, MixedPrecisionPolicy, NoPrefetch
from fullshard.sharding import converted

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullPrecisionInside",
    "MixedPrecision",
    "ShardingStrategy",
    "offload_policy_of",
    "prefetch_policy_of",
    "require_kind",
]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ShardingStrategy(Enum):
    """Which tensors are sharded over which ranks, and when full parameters are freed."""

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state; parameters are freed after forward."""
    SHARD_GRAD_OP = auto()
    """The same; parameters are kept from forward to backward."""
    NO_SHARD = auto()
    """Nothing: every rank has whole parameters, and gradients are all-reduced."""
    HYBRID_SHARD = auto()
    """FULL_SHARD inside a node, replicated across nodes."""
    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP inside a node, replicated across nodes."""

    @property
    def is_hybrid(self) -> bool:
        """Whether shards are replicated."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def keeps_parameters(self) -> bool:
        """Whether full parameters stay from forward to backward."""
        return self in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


class BackwardPrefetch(Enum):
    """When backward gathers the next parameters."""

    BACKWARD_PRE = auto()
    """Before the gradients of the present ones: most overlap, one group more in memory."""
    BACKWARD_POST = auto()
    """After them: beside their reduction only."""


@dataclass(frozen=True)
class MixedPrecision:
    """In what dtypes to compute, reduce and keep buffers.

    Attributes:
        param_dtype: in which parameters are gathered and the module computes; None: their own.
        reduce_dtype: in which gradients are reduced; None: ``param_dtype``.
        buffer_dtype: to which floating-point buffers are cast at the first forward; None: as they
            are. State dicts have them in their own dtype.
        keep_low_precision_grads: leave gradients in the dtype in which they were reduced, for an
            optimizer that takes them so.
        cast_forward_inputs: cast the inputs of instances inside the root to ``param_dtype``.
        cast_root_forward_inputs: cast the root's inputs to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    # With auto_wrap_policy, modules of these classes compute in full precision.
    _module_classes_to_ignore: Sequence[type[nn.Module]] = BATCH_NORMS

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            TypeError: if a dtype is not a floating-point ``torch.dtype`` or None, a flag not a
                bool, or a class to ignore not a module class.
        """
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            value = getattr(self, name)
            known = isinstance(value, torch.dtype) and value.is_floating_point
            if value is not None and not known:
                raise TypeError(f"{name} is {value!r}; pass a floating-point torch.dtype or None")
        flags = ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; pass True or False")
        for each in self.classes_to_ignore:
            if not (isinstance(each, type) and issubclass(each, nn.Module)):
                raise TypeError(
                    f"_module_classes_to_ignore holds {each!r}; pass subclasses of nn.Module"
                )

    @property
    def classes_to_ignore(self) -> tuple[type[nn.Module], ...]:
        """The classes whose modules compute in full precision under an ``auto_wrap_policy``."""
        return tuple(self._module_classes_to_ignore)

    @property
    def low_precision(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced; None: that of the parameters."""
        return self.reduce_dtype or self.param_dtype

    def policy(self) -> MixedPrecisionPolicy | None:
        """Return the ``mp_policy`` of ``fully_shard``; None where dtypes stay as they are.

        Inputs are cast by the wrapper, as which instance is the root is known later.
        """
        if self.low_precision is None:
            return None
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=False,
        )

    def input_dtype(self, *, is_root: bool) -> torch.dtype | None:
        """Return the dtype to which inputs are cast; None: as they come."""
        casts = self.cast_root_forward_inputs if is_root else self.cast_forward_inputs
        return self.param_dtype if casts else None


@dataclass(frozen=True)
class FullPrecisionInside(MixedPrecision):
    """Full precision for one module of a model that computes in less.

    Attributes:
        output_dtype: to which its outputs are cast: what the model around it computes in.
    """

    output_dtype: torch.dtype | None = None

    def policy(self) -> MixedPrecisionPolicy | None:
        """Return the ``mp_policy`` of ``fully_shard``."""
        return MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=self.output_dtype)


@dataclass
class CPUOffload:
    """Whether shards live on the CPU.

    Attributes:
        offload_params: keep shards and their gradients on the CPU, and step the optimizer there.
    """

    offload_params: bool = False


_K = TypeVar("_K")


def require_kind(name: str, value: object, kind: type[_K]) -> _K:
    """Return ``value``, which is a ``kind``; for torch's own class of that name, ours.

    Raises:
        TypeError: if it is neither.
    """
    ours = converted(value, {kind.__name__: kind})
    if isinstance(ours, kind):
        return ours
    raise TypeError(f"{name} is {value!r}; pass a {kind.__name__} of fullshard.wrappers.fsdp1")


def offload_policy_of(offload: CPUOffload | None) -> CPUOffloadPolicy | None:
    """Return the ``offload_policy`` of ``fully_shard``; None where nothing is offloaded."""
    return CPUOffloadPolicy() if offload is not None and offload.offload_params else None


def prefetch_policy_of(backward: BackwardPrefetch | None, *, forward: bool) -> Any:
    """Return the ``prefetch_policy`` of ``fully_shard``; None where that is its default.

    Gathering after the present gradients is gathering on demand: the next module's backward asks
        for the parameters at once, and the reduction continues at the same time.
    """
    ahead = 1 if backward is BackwardPrefetch.BACKWARD_PRE else 0
    if forward:
        return DepthPrefetch(forward=1, backward=ahead)
    return None if ahead else NoPrefetch()
