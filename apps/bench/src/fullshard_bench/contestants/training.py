"""A contestant that is ready to train, and its step.

Owns the order of a step, which is the same for all: forward, backward, clip, optimizer, gradients
dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard_bench.models.workload import Workload, fill, fill_locally
from fullshard_bench.settings import Settings

__all__ = [
    "MasterWeights",
    "Outcome",
    "Stopwatch",
    "Trainee",
    "empty_model",
    "make_optimizer",
    "materialise",
]

_LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a step on the device: loss, and gradient norm before clipping."""

    loss: torch.Tensor
    norm: torch.Tensor | None


class Stopwatch:
    """Adds up the time of the parts of a construction that are the contestant's own."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Return a context whose time is added."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


class MasterWeights:
    """Float32 parameters of a model that computes in a lower dtype; the optimizer steps on them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        trained = [each for each in model.parameters() if each.requires_grad]
        self.computed: list[torch.Tensor] = [*trained]
        self.masters: list[torch.Tensor] = [nn.Parameter(each.detach().clone()) for each in trained]
        self.dtype = dtype
        model.to(dtype)
        model.register_forward_pre_hook(self._cast)

    def _cast(self, model: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Inputs in the dtype that is computed in, as `fully_shard` casts them too."""
        return tuple(
            each.to(self.dtype)
            if isinstance(each, torch.Tensor) and each.is_floating_point()
            else each
            for each in args
        )

    def pull(self) -> None:
        """Move the gradients of the model to the masters, in float32."""
        for master, computed in zip(self.masters, self.computed, strict=True):
            grad = computed.grad
            master.grad = None if grad is None else grad.to(master.dtype)
            computed.grad = None

    @torch.no_grad()
    def push(self) -> None:
        """Write the masters into the model."""
        torch._foreach_copy_(self.computed, self.masters)


@dataclass(kw_only=True)
class Trainee:
    """A sharded model with its optimizer.

    Attributes:
        model: what is called, and whose parameters and buffers this rank holds.
        workload: gives batch and loss.
        optimizer: steps on what this rank holds.
        clip: clips the gradients and returns their norm before; None does not clip.
        groups: how many groups of parameters are gathered and reduced; 0 if none is.
        masters: float32 parameters, where the model's own are of a lower dtype.
        padding_percent: bytes that a gather moves beyond the parameters, in percent of them.
        construction_s: seconds that the contestant's own calls took.
        shares_gradients: whether ranks train one model; False for the unsharded step.
        combine: combines the ranks' gradients before clipping, where the model does not.
        after_forward: called between forward and backward, by who looks at memory.
        rounds_to: the lowest dtype of computing or sending, if it differs from the settings: it
            is held to that one's tolerance.
    """

    model: nn.Module
    workload: Workload
    optimizer: torch.optim.Optimizer
    clip: Callable[[], torch.Tensor] | None
    groups: int = 0
    masters: MasterWeights | None = None
    padding_percent: float = 0.0
    construction_s: float = 0.0
    shares_gradients: bool = True
    combine: Callable[[Sequence[torch.Tensor]], None] | None = None
    after_forward: Callable[[], None] | None = None
    rounds_to: str = ""

    def step(self, batch: Sequence[torch.Tensor]) -> Outcome:
        """Train on a batch."""
        loss = self.workload.loss(self.model, batch)
        if self.after_forward is not None:
            self.after_forward()
        loss.backward()
        if self.masters is not None:
            self.masters.pull()
        if self.combine is not None:
            self.combine(self._gradients())
        norm = None if self.clip is None else self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not None:
            self.masters.push()
        return Outcome(loss=loss.detach(), norm=norm)

    def _gradients(self) -> list[torch.Tensor]:
        owned = self.model.parameters() if self.masters is None else self.masters.masters
        return [each.grad for each in owned if each.grad is not None]

    def held(self) -> list[torch.Tensor]:
        """The tensors that live from step to step: parameters, buffers, optimizer state."""
        tensors: list[torch.Tensor] = [*self.model.parameters(), *self.model.buffers()]
        if self.masters is not None:
            tensors += self.masters.masters
        for state in self.optimizer.state.values():
            tensors += [each for each in state.values() if isinstance(each, torch.Tensor)]
        return tensors


def empty_model(workload: Workload, device: torch.device, seed: int) -> nn.Module:
    """The model as it is handed to a contestant: on the meta device where the workload allows."""
    if workload.on_meta:
        with torch.device("meta"):
            return workload.build()
    torch.manual_seed(seed)
    with device:
        return workload.build()


def materialise(
    model: nn.Module, workload: Workload, settings: Settings, device: torch.device, *, real: bool
) -> None:
    """Give a model made on the meta device its memory and its first values."""
    if not workload.on_meta:
        return
    if any(each.is_meta for each in model.parameters()):
        model.to_empty(device=device)
    if real:
        fill(model, workload, settings.seed, device)
    else:
        fill_locally(model)


def make_optimizer(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer that every contestant uses: fused AdamW."""
    return torch.optim.AdamW(parameters, lr=_LEARNING_RATE, fused=True)
