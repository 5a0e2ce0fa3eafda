"""The extension of optimizer steps that steps plain shards, or copies where offload wants it.

Owns the choice, for each optimizer, of what takes its place during a step; ``shadow_optimizer``
makes that. A step that only wraps another optimizer keeps copies, which are up to date while the
optimizer inside steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.optim.steps.rules import steps_on_plain
from fullshard.optim.steps.shadow import UnlikeShards
from fullshard.optim.steps.shadow_optimizer import ShadowOptimizer, open_on, place_state
from fullshard.sharding import FSDPParam, StepExtension
from fullshard.sharding.spi import owner_of, params_in

__all__ = ["ShadowSteps"]


class ShadowSteps(StepExtension):
    """Steps a shadow of one optimizer, where shards can be plain tensors or step elsewhere."""

    def __init__(self) -> None:
        """Know nothing yet; see ``on_parameters``."""
        self._params: list[Any] = []
        self._steps_on_plain = False
        self._steps_elsewhere = False
        self._places_state = False
        self._kept: ShadowOptimizer | None = None

    def on_parameters(self, optimizer: Optimizer) -> None:
        """Choose between plain shards, copies and the parameters themselves.

        Raises:
            TypeError: if it needs whole parameters and one is cut.
        """
        self._params = params_in(getattr(optimizer, "param_groups", ()))
        # An optimizer that only wraps another has groups as a property, and the other has hooks.
        own = params_in(vars(optimizer).get("param_groups", ()))
        owners = [
            owner
            for param in own
            if isinstance(param, DTensor) and (owner := owner_of(param)) is not None
        ]
        self._steps_on_plain = bool(owners) and steps_on_plain(type(optimizer), own)
        self._steps_elsewhere = any(map(_steps_elsewhere, owners))
        if self._steps_elsewhere and not self._places_state:
            self._places_state = True
            optimizer.register_load_state_dict_post_hook(place_state)
            place_state(optimizer)

    def before_step(self, optimizer: Optimizer, stepped: Optimizer) -> Optimizer:
        """Return a shadow of ``optimizer``, or ``stepped``."""
        for outer in open_on(self._params):
            outer.write_back()
        if stepped is not optimizer:  # a user's hook chose what to step
            return stepped
        if self._steps_on_plain and not torch.compiler.is_compiling():
            shadow = self._kept or ShadowOptimizer(plain=True)
            try:
                shown = shadow.begin(optimizer)
                self._kept = None if shadow.copies else shadow
                return shown or optimizer
            except UnlikeShards:
                pass
        shown = ShadowOptimizer(plain=False).begin(optimizer) if self._steps_elsewhere else None
        return shown or optimizer

    def before_closure(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Bring the parameters up to date for the closure."""
        shadow = ShadowOptimizer.of(stepped)
        if shadow is not None:
            shadow.before_closure(optimizer)

    def after_closure(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Take over what the closure changed."""
        shadow = ShadowOptimizer.of(stepped)
        if shadow is not None:
            shadow.after_closure(optimizer, stepped)

    def after_step(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Take the results of the step over."""
        shadow = ShadowOptimizer.of(stepped)
        if shadow is not None:
            shadow.end(optimizer, stepped)
        for outer in open_on(self._params):
            outer.read()


def _steps_elsewhere(owner: FSDPParam) -> bool:
    probe = torch.empty(0, device=owner.shard.device)
    return owner.offload.stage_step(probe, owner.device) is not probe
