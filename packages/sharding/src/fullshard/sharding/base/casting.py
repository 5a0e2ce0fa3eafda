"""How the inputs and outputs of a module are cast; a root's inputs move to its device, too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.sharding.base.policies import declares
from fullshard.sharding.base.stand_ins import StandIns
from fullshard.sharding.protocols import ModuleCasts

__all__ = ["Casts"]


@dataclass(frozen=True, slots=True)
class Casts:
    """The casts of one module.

    Attributes:
        policy: answers for each tensor.
        device: to which inputs are moved first; None: they stay.
        of_inputs: whether inputs may change.
        of_outputs: whether outputs may.
    """

    policy: ModuleCasts
    device: torch.device | None
    of_inputs: bool
    of_outputs: bool

    @classmethod
    def of(cls, policy: ModuleCasts, device: torch.device | None) -> Casts:
        """Return those of ``policy``; ``device``: of a root, whose inputs may be on the host."""
        moved = None if device is None or device.type == "cpu" else device
        casts = not declares(policy, "casts_nothing")
        return cls(policy, moved, of_inputs=casts or moved is not None, of_outputs=casts)

    def made(self, inputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
        """Return what the inputs hold while forward runs."""
        if self.device is not None:
            inputs = [tensor.to(self.device, non_blocking=True) for tensor in inputs]
        return map(self.policy.cast_input, inputs)

    def output(self, output: Any) -> Any:
        """Return what forward returned, cast."""
        return self.policy.cast_output(output)

    def put_again(self, inputs: Iterable[weakref.ref[torch.Tensor]]) -> StandIns:
        """Exchange the inputs that still exist, as forward did, and return their stand-ins."""
        stand_ins = StandIns()
        with torch.enable_grad():
            tensors = [tensor for each in inputs if (tensor := each()) is not None]
            stand_ins.put(tensors, self.made(tensors))
        return stand_ins
