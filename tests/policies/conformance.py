"""Each policy handed to the protocol that it answers: mypy accepts this file, or a policy drifted.

Never imported: ``test_conformance`` has mypy read it, alone and with a policy changed in a copy.
"""

from __future__ import annotations

from fullshard.policies import (
    ClassWrap,
    CPUOffloadPolicy,
    DepthPrefetch,
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
    ModuleCasts,
    NoOffload,
    Offload,
    OffloadToCPU,
    ParameterDTypes,
    PrecisionPolicy,
    PrefetchPolicy,
    ReshardPolicy,
    ReverseOrderPrefetch,
)

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
    NoOffload(),
    OffloadToCPU(),
)
RESHARD: tuple[ReshardPolicy, ...] = (
    ReshardExceptRoot(),
    ReshardAlways(),
    KeepUnsharded(),
    FixedReshard(),
)
PREFETCH: tuple[PrefetchPolicy, ...] = (DepthPrefetch(), NoPrefetch(), ReverseOrderPrefetch())
WRAP: tuple[WrapPolicy, ...] = (ClassWrap(()), SizeWrap())
