"""All faults to plant, each with what ``verify`` must say of it."""

from __future__ import annotations

from support.verification import between, communication, losses, models, optimizers
from support.verification.fault import Fault

FAULTS: list[Fault] = [
    *models.FAULTS,
    *losses.FAULTS,
    *between.FAULTS,
    *communication.FAULTS,
    *optimizers.FAULTS,
]
