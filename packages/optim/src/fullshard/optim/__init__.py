"""Optimizers of whole matrices and of few bits, whose answer does not depend on the mesh.

Owns optimizers that do to a sharded model what they do to the unsharded one, and their state. It
refuses to know a training step: gradients come as ``fully_shard`` leaves them.
"""

from fullshard.optim.adamw8bit import AdamW8bit
from fullshard.optim.grouping import matrix_groups
from fullshard.optim.muon import Muon
from fullshard.optim.soap import SOAP

__all__ = ["SOAP", "AdamW8bit", "Muon", "matrix_groups"]
