"""Makes an optimizer's step again, on full parameters, a few parameters at a time.

The step begins from the parameters, gradients and state of the sharded run before its step. Each
rank keeps its shards of these.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight.verification.agree import everyones, from_first, jointly, raise_together
from fullshard.preflight.verification.comparing.compare import Comparison
from fullshard.preflight.verification.comparing.optimizers import (
    Settings,
    compare_states,
    settings_of,
    states_of,
)
from fullshard.preflight.verification.comparing.tensors import full, local
from fullshard.preflight.verification.program import Program
from fullshard.preflight.verification.sharded import Sharded
from fullshard.preflight.verification.verdict import Phase

__all__ = ["Start", "Stepped", "Updates"]


@dataclass(frozen=True)
class Start:
    """The start of an optimizer's step, by parameter; a step changes copies.

    Attributes:
        values: of the parameters.
        gradients: None for a parameter without one.
        states: by key what the optimizer keeps.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)

    def of(self, names: Iterable[str]) -> Start:
        """Return the start of some parameters."""
        names = list(names)
        return Start(
            {name: self.values[name] for name in names},
            {name: self.gradients[name] for name in names},
            {name: self.states[name] for name in names},
        )


class Stepped:
    """The result of an optimizer's steps from a start.

    Attributes:
        params: by name.
        states: by name and key.
        settings: of the optimizer.
    """

    def __init__(
        self,
        program: Program,
        start: Start,
        trained: Mapping[str, bool],
        *,
        times: int = 1,
        settings: Settings | None = None,
    ) -> None:
        """Make steps with the same gradients.

        Args:
            program: whose optimizer it is.
            start: what they begin from.
            trained: which parameters require gradients.
            times: how many.
            settings: by parameter what the optimizer is set to; None: what the program sets.
        """
        self.params: dict[str, nn.Parameter] = {}
        for name, value in start.values.items():
            param = nn.Parameter(value.clone(), requires_grad=trained[name])
            grad = start.gradients[name]
            param.grad = None if grad is None else grad.clone()
            self.params[name] = param
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        self.settings: Settings = {}
        if not self.params:
            return
        optimizer = program.optimizer_of(list(self.params.values()))
        for name, param in self.params.items():
            if start.states.get(name):
                kept = {key: _copied(value) for key, value in start.states[name].items()}
                optimizer.state[param].update(kept)
        names = {id(param): name for name, param in self.params.items()}
        for group in optimizer.param_groups if settings is not None else ():
            assert settings is not None, "it was just asked"
            for param in group["params"][:1]:
                group.update(settings.get(names[id(param)], {}))
        for _ in range(times):
            optimizer.step()
        self.states = states_of([optimizer], self.params)
        self.settings = settings_of([optimizer], self.params)


class Updates:
    """The start of the step of the only optimizer; make one before it, and compare after it.

    Attributes:
        unknown: parameters whose state has the shape of a shard, so that no reference has this
            state.
        coupled: parameters whose update depends on others', so that no layer alone shows it.
        sharded: whose step it is.
        shards: what this rank's step begins from.
    """

    def __init__(self, sharded: Sharded, program: Program, device: torch.device) -> None:
        """Copy this rank's shards. ``device``: where steps are made again."""
        self.sharded = sharded
        self._program = program
        self._device = device
        self.unknown: set[str] = set()
        self.coupled: set[str] = set()
        state = sharded.optimizers[0].state
        self.shards = Start(
            {name: each.detach().clone() for name, each in sharded.params.items()},
            {
                name: None if each.grad is None else each.grad.detach().clone()
                for name, each in sharded.params.items()
            },
            {
                name: {key: _copied(value) for key, value in state.get(each, {}).items()}
                for name, each in sharded.params.items()
            },
        )

    @property
    def trained(self) -> dict[str, bool]:
        """Which parameters require gradients."""
        return {name: each.requires_grad for name, each in self.sharded.params.items()}

    def start_of(self, names: Sequence[str], *, everywhere: bool = False) -> Start:
        """Return full values, gradients and state; all ranks call it.

        Parameters whose state has the shape of a shard are left out, and noted in ``unknown``.

        Args:
            names: of parameters.
            everywhere: on each rank; else on rank 0, and nothing on the others.
        """
        start = Start()
        for name in names:
            value, grad = full(self.shards.values[name]), self.shards.gradients[name]
            whole = None if grad is None else full(grad)
            state = {key: _full(each) for key, each in self.shards.states[name].items()}
            if any(not _fits(each, value) for each in state.values()):
                self.unknown.add(name)
            elif everywhere or dist.get_rank() == 0:
                start.values[name] = value.to(self._device, copy=True)
                start.gradients[name] = None if whole is None else whole.to(self._device, copy=True)
                start.states[name] = state
        return start

    def compare(self, comparison: Comparison, names: list[str]) -> Settings:
        """Compare some parameters and their state after the step; all ranks call it.

        Returns the settings of the optimizer that made the step again, on rank 0.
        """
        start = self.start_of(names)
        again = raise_together(lambda: Stepped(self._program, start, self.trained))
        found = len(comparison.differences)
        for name in names:
            came = full(self.sharded.params[name])
            if name in again.params:
                wanted = again.params[name].detach()
                comparison.tensors(Phase.UPDATE, name, came, wanted, start.values[name])
        own = {name: self.sharded.params[name] for name in names}
        compare_states(comparison, states_of(self.sharded.optimizers, own), again.states)
        if from_first(len(comparison.differences) > found) and not self._is_separable(names):
            self.coupled.update(names)
            comparison.forget_updates(names)
        return again.settings

    def _is_separable(self, names: list[str]) -> bool:
        """Whether a step on some shards alone does to them what the step on all did.

        A step that clips by the norm of all gradients is not separable. All ranks call it.
        """
        again = jointly(lambda: Stepped(self._program, self.shards.of(names), self.trained))
        pairs = [(self.sharded.params[name], again.params[name]) for name in names]
        return all(everyones(all(_near(local(one), local(other)) for one, other in pairs)))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)


def _full(value: Any) -> Any:
    return full(value).clone() if isinstance(value, torch.Tensor) else value


def _fits(value: Any, param: torch.Tensor) -> bool:
    """Return whether a value of an optimizer's state belongs to the whole parameter."""
    return not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == param.shape
