"""How the inputs of a module are cast, and moved to the device where its root computes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fullshard.sharding.base.stand_ins import StandIns
from fullshard.sharding.protocols import ModuleCasts

__all__ = ["InputCasts"]


@dataclass(frozen=True, slots=True)
class InputCasts:
    """The casts of one module.

    Attributes:
        policy: answers for each tensor.
        device: to which inputs are moved first; None: they stay.
    """

    policy: ModuleCasts
    device: torch.device | None

    def put(self, stand_ins: StandIns, inputs: list[torch.Tensor]) -> None:
        """Exchange ``inputs`` for their casts."""
        moved = inputs
        if self.device is not None:
            moved = [tensor.to(self.device, non_blocking=True) for tensor in inputs]
        stand_ins.put(inputs, map(self.policy.cast_input, moved))

    def put_again(self, inputs: Iterable[weakref.ref[torch.Tensor]]) -> StandIns:
        """Exchange the inputs that still exist, as forward did, and return their stand-ins."""
        stand_ins = StandIns()
        with torch.enable_grad():
            self.put(stand_ins, [tensor for each in inputs if (tensor := each()) is not None])
        return stand_ins
