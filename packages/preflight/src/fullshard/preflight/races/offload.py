"""The name under which programs that are watched for races may know ``CPUOffloadPolicy``."""

from __future__ import annotations

from fullshard.policies import CPUOffloadPolicy

__all__ = ["SimulatedOffloadPolicy"]


class SimulatedOffloadPolicy(CPUOffloadPolicy):
    """``CPUOffloadPolicy``, whose copies every watch simulates, under another name."""
