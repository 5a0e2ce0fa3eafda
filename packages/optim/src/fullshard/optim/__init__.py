"""Optimizers of whole matrices and of few bits, and averages of parameters, equal on any mesh.

Optimizers that give a sharded model the updates of the unsharded model, and their state; and
averages of what they step. ``clip_grad_norm_`` clips gradients on any meshes. A training step is
the caller's: gradients come as ``fully_shard`` leaves them.
"""

from fullshard.optim.adamw8bit import AdamW8bit
from fullshard.optim.averaging import ExponentialMovingAverage
from fullshard.optim.grouping import matrix_groups
from fullshard.optim.muon import Muon
from fullshard.optim.norm.clip import clip_grad_norm_, grad_norm
from fullshard.optim.overlapped import OverlappedStep, OverlappedStepError
from fullshard.optim.soap import SOAP
from fullshard.optim.steps.shadow_steps import ShadowSteps
from fullshard.optim.tiers.offloaded import OffloadedOptimizer
from fullshard.optim.tiers.tier import (
    FileTier,
    HostTier,
    OffloadStatistics,
    StateOffloadError,
)
from fullshard.sharding import STEP_EXTENSIONS

STEP_EXTENSIONS.append(ShadowSteps)

__version__ = "0.1.0"

__all__ = [
    "SOAP",
    "AdamW8bit",
    "ExponentialMovingAverage",
    "FileTier",
    "HostTier",
    "Muon",
    "OffloadStatistics",
    "OffloadedOptimizer",
    "OverlappedStep",
    "OverlappedStepError",
    "StateOffloadError",
    "clip_grad_norm_",
    "grad_norm",
    "matrix_groups",
]
