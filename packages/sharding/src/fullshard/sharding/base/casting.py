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

    def made(self, inputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Return what the inputs hold while forward runs."""
        if self.device is not None:
            inputs = [tensor.to(self.device, non_blocking=True) for tensor in inputs]
        return map(self.policy.cast_input, inputs)

    def put_again(self, inputs: Iterable[weakref.ref[torch.Tensor]]) -> StandIns:
        """Exchange the inputs that still exist, as forward did, and return their stand-ins."""
        stand_ins = StandIns()
        with torch.enable_grad():
            tensors = [tensor for each in inputs if (tensor := each()) is not None]
            stand_ins.put(tensors, self.made(tensors))
        return stand_ins
