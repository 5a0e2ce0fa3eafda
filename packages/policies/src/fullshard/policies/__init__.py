"""Answers to sharding's questions: precision, offload, resharding, prefetch, wrapping, order.

Owns frozen dataclasses that satisfy the protocols of ``fullshard.sharding`` structurally. The
dataclasses start no collective; only ``FileOffloadPolicy`` has anything open, a file.
"""

from fullshard.policies.file_offload import FileOffloadPolicy, FileOffloadStatistics
from fullshard.policies.mixed_precision import MixedPrecisionPolicy
from fullshard.policies.offload import CPUOffloadPolicy, OffloadPolicy
from fullshard.policies.offload_errors import FallibleOffload, GradientOffload, OffloadErrors
from fullshard.policies.prefetch import DepthPrefetch, NoPrefetch
from fullshard.policies.reshard import KeepUnsharded, ReshardAlways, ReshardExceptRoot
from fullshard.policies.schedules.canonical_order import CanonicalOrder
from fullshard.policies.schedules.coalesced import CoalescedSchedule
from fullshard.policies.wrap import ClassWrap, SizeWrap, WrapPolicy, wrap
from fullshard.sharding import ROOT_EXTENSIONS, SCHEDULES

__version__ = "0.1.0"

ROOT_EXTENSIONS.append(OffloadErrors())
SCHEDULES.append(CoalescedSchedule)

__all__ = [
    "CPUOffloadPolicy",
    "CanonicalOrder",
    "ClassWrap",
    "CoalescedSchedule",
    "DepthPrefetch",
    "FallibleOffload",
    "FileOffloadPolicy",
    "FileOffloadStatistics",
    "GradientOffload",
    "KeepUnsharded",
    "MixedPrecisionPolicy",
    "NoPrefetch",
    "OffloadPolicy",
    "ReshardAlways",
    "ReshardExceptRoot",
    "SizeWrap",
    "WrapPolicy",
    "wrap",
]
