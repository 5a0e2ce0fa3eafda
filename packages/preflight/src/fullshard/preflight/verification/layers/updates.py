"""Compares the optimizer's step, a few parameters at a time.

The reference is the same optimizer on the full parameters, gradients and state, all as they were in
the sharded run before its step; kept of them are this rank's shards.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.preflight.verification.agree import everyones, from_first, jointly, together
from fullshard.preflight.verification.compare import Comparison
from fullshard.preflight.verification.program import Program
from fullshard.preflight.verification.sharded import Sharded, full
from fullshard.preflight.verification.verdict import Phase

__all__ = ["Updates"]


class Updates:
    """What an optimizer's step began from; make one before the step, and compare after it.

    Attributes:
        unknown: parameters whose state has the shape of a shard, so that no reference has it.
        coupled: parameters whose update depends on others', so that no layer alone shows it.
    """

    def __init__(self, sharded: Sharded, program: Program, device: torch.device) -> None:
        self._sharded = sharded
        self._program = program
        self._device = device
        self.unknown: set[str] = set()
        self.coupled: set[str] = set()
        state = sharded.optimizer.state
        self._values = {name: each.detach().clone() for name, each in sharded.params.items()}
        self._grads = {
            name: None if each.grad is None else each.grad.detach().clone()
            for name, each in sharded.params.items()
        }
        self._state = {
            name: {key: _copied(value) for key, value in state.get(each, {}).items()}
            for name, each in sharded.params.items()
        }

    def compare(self, comparison: Comparison, names: list[str]) -> None:
        """Compares the values after the step of some parameters; all ranks call it."""
        mine: dict[str, nn.Parameter] = {}
        states: dict[str, dict[str, Any]] = {}
        pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in names:
            grad = self._grads[name]
            before, after = full(self._values[name]), full(self._sharded.params[name])
            whole = None if grad is None else full(grad)
            state = {key: _full(value) for key, value in self._state[name].items()}
            if any(not _fits(value, before) for value in state.values()):
                self.unknown.add(name)
            elif dist.get_rank() == 0:
                trained = self._sharded.params[name].requires_grad
                value = before.to(self._device, copy=True)
                mine[name] = nn.Parameter(value, requires_grad=trained)
                mine[name].grad = None if whole is None else whole.to(self._device, copy=True)
                states[name], pairs[name] = state, (before, after)
        together(lambda: self._step(mine, states))
        found = len(comparison.differences)
        for name, (before, after) in pairs.items():
            comparison.tensors(Phase.UPDATE, name, after, mine[name].detach(), before)
        if from_first(len(comparison.differences) > found) and not self._is_separable(names):
            self.coupled.update(names)
            comparison.forget_updates(names)

    def _is_separable(self, names: list[str]) -> bool:
        """Whether a step on some shards alone does to them what the step on all did.

        One that clips by the norm of all gradients is not. All ranks call it.
        """
        mine = {name: nn.Parameter(self._values[name].clone()) for name in names}
        for name, param in mine.items():
            param.requires_grad_(self._sharded.params[name].requires_grad)
            param.grad = self._grads[name]
        states = {
            name: {key: _copied(value) for key, value in self._state[name].items()}
            for name in names
        }
        jointly(lambda: self._step(mine, states))
        ours = (_local(self._sharded.params[name]) for name in names)
        theirs = (_local(param) for param in mine.values())
        return all(everyones(all(map(_near, ours, theirs))))

    def _step(self, mine: dict[str, nn.Parameter], states: dict[str, dict[str, Any]]) -> None:
        if not mine:
            return
        optimizer = self._program.optimizer_of(list(mine.values()))
        for name, param in mine.items():
            if states[name]:
                optimizer.state[param].update(states[name])
        optimizer.step()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)


def _full(value: Any) -> Any:
    return full(value).clone() if isinstance(value, torch.Tensor) else value


def _fits(value: Any, param: torch.Tensor) -> bool:
    """Whether a value of an optimizer's state is that of the whole parameter."""
    return not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == param.shape
