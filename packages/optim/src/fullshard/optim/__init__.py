"""Optimizers of whole matrices and of few bits, and averages of parameters, equal on any mesh.

Owns optimizers that do to a sharded model what they do to the unsharded one, and their state; and
averages of what they step. It refuses to know a training step: gradients come as ``fully_shard``
leaves them.
"""

from fullshard.optim.adamw8bit import AdamW8bit
from fullshard.optim.averaging import ExponentialMovingAverage
from fullshard.optim.grouping import matrix_groups
from fullshard.optim.muon import Muon
from fullshard.optim.soap import SOAP

__all__ = ["SOAP", "AdamW8bit", "ExponentialMovingAverage", "Muon", "matrix_groups"]
