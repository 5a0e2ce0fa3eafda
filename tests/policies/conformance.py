"""Each policy handed to the protocol that it answers, and policies that drifted from theirs.

``nox -s types`` reads it: mypy would complain of a policy that is none, and of an ignore below that
nothing needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.policies import (
    ClassWrap,
    CPUOffloadPolicy,
    DepthPrefetch,
    FallibleOffload,
    FileOffloadPolicy,
    GradientOffload,
    KeepUnsharded,
    MixedPrecisionPolicy,
    NoPrefetch,
    OffloadPolicy,
    ReshardAlways,
    ReshardExceptRoot,
    SizeWrap,
    WrapPolicy,
)
from fullshard.sharding import (
    FieldPrecision,
    FixedReshard,
    FullPrecision,
    FullWidth,
    ModuleCasts,
    NoOffload,
    Offload,
    OffloadToCPU,
    ParameterDTypes,
    PrecisionPolicy,
    PrefetchPolicy,
    ReshardPolicy,
    ReverseOrderPrefetch,
    WireForms,
)
from fullshard.wire import WirePolicy

PRECISION: tuple[PrecisionPolicy, ...] = (
    MixedPrecisionPolicy(),
    FullPrecision(),
    FieldPrecision(),
)
DTYPES: tuple[ParameterDTypes, ...] = (
    MixedPrecisionPolicy(),
    FullPrecision(),
    FieldPrecision(),
)
CASTS: tuple[ModuleCasts, ...] = (
    MixedPrecisionPolicy(),
    FullPrecision(),
    FieldPrecision(),
)
OFFLOAD: tuple[Offload, ...] = (
    OffloadPolicy(),
    CPUOffloadPolicy(),
    FileOffloadPolicy("/"),
    NoOffload(),
    OffloadToCPU(),
)
FALLIBLE: FallibleOffload = FileOffloadPolicy("/")
GRADIENTS: GradientOffload = FileOffloadPolicy("/", gradients=True)
RESHARD: tuple[ReshardPolicy, ...] = (
    ReshardExceptRoot(),
    ReshardAlways(),
    KeepUnsharded(),
    FixedReshard(),
)
PREFETCH: tuple[PrefetchPolicy, ...] = (DepthPrefetch(), NoPrefetch(), ReverseOrderPrefetch())
WIRE: tuple[WireForms, ...] = (WirePolicy(), FullWidth())
WRAP: tuple[WrapPolicy, ...] = (ClassWrap(()), SizeWrap())


@dataclass(frozen=True)
class AnotherArgument(ReshardAlways):
    # An override that lacks an argument: what drifted.
    def after_forward(self) -> bool:  # type: ignore[override]
        return True


@dataclass(frozen=True)
class AnotherName:
    def after_forwards(self, is_root: bool) -> bool:
        return True


@dataclass(frozen=True)
class AnotherType(MixedPrecisionPolicy):
    # An override whose argument is of another type: what drifted.
    def gathered_dtype(self, name: str, dtype: str) -> torch.dtype:  # type: ignore[override]
        return torch.float32


@dataclass(frozen=True)
class AnotherAnswer(NoPrefetch):
    # An override that returns another type: what drifted.
    def in_forward(self, order: Sequence[str], position: int) -> int:  # type: ignore[override]
        return 1


@dataclass(frozen=True)
class AnotherAttribute(OffloadPolicy):
    # An attribute where a method was: what drifted.
    home: int = 3  # type: ignore[assignment]


# None of them answers its protocol, and mypy sees it.
DRIFTED_RESHARD: ReshardPolicy = AnotherArgument()  # type: ignore[assignment]
DRIFTED_NAME: ReshardPolicy = AnotherName()  # type: ignore[assignment]
DRIFTED_PRECISION: PrecisionPolicy = AnotherType()  # type: ignore[assignment]
DRIFTED_PREFETCH: PrefetchPolicy = AnotherAnswer()  # type: ignore[assignment]
DRIFTED_OFFLOAD: Offload = AnotherAttribute()  # type: ignore[assignment]
