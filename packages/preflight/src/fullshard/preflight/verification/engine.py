"""Both runs, one step of each after the other, compared as they go.

Owns the order of a step and of its collectives. Every rank trains the sharded model on its own
batch; rank 0 alone also trains the unsharded one, on all ranks' batches one after another, and
compares. Whatever must be gathered is gathered by all ranks in one order, which rank 0 says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight.verification.agree import (
    Alone,
    everyones,
    from_first,
    jointly,
    together,
)
from fullshard.preflight.verification.compare import Comparison
from fullshard.preflight.verification.draws import Draws
from fullshard.preflight.verification.program import (
    Program,
    looks_of,
    remarks_on,
    require_shapes,
    shapes_of,
)
from fullshard.preflight.verification.room import reference_device
from fullshard.preflight.verification.sharded import Sharded, apart, full, look_at
from fullshard.preflight.verification.tolerance import Tolerance
from fullshard.preflight.verification.trace import Trace, traced
from fullshard.preflight.verification.verdict import Outcome, Phase
from fullshard.sharding import map_tensors

__all__ = ["run"]

Traces = tuple[list[Trace], list[Trace]]


def run(program: Program, stretch: float = 1.0) -> Outcome:
    """Trains both ways for ``program.steps`` steps, or to the first that differs; same everywhere.

    Raises:
        Exception: what the user's functions raise; on the other ranks a ``RuntimeError`` about it.
    """
    return from_first(_Runs(program, stretch).outcome())


class _Runs:
    def __init__(self, program: Program, stretch: float) -> None:
        self._program = program
        self._world, self._rank = dist.get_world_size(), dist.get_rank()
        self._sharded = Sharded(program)
        home = self._sharded.home
        self._untied: tuple[str, ...] = ()
        self._reference, self._device = together(lambda: self._made_reference(home))
        self._draws = Draws(self._device, program.seed)
        self._draws.seed()
        self._mean = self._size = 0.0
        self._found = Outcome(
            tolerance=Tolerance(dtype=self._sharded.dtype, world_size=self._world, stretch=stretch),
            device=str(self._device),
            untied=self._untied,
            notes=(
                f"the reference trained on rank 0 ({self._device}), on the batches of "
                f"{self._world} ranks in turn",
            ),
        )

    def _made_reference(self, home: torch.device) -> tuple[nn.Module | None, torch.device]:
        if self._rank > 0:
            return None, home
        model = self._program.built()
        self._untied = self._sharded.untied(model)
        device = reference_device(model, home)
        return model.to(device), device

    def outcome(self) -> Outcome:
        """Runs; rank 0's is the one that counts."""
        reference, sharded, found = self._reference, self._sharded, self._found
        comparison = Comparison(found.tolerance, step=0)
        optimizer = together(
            lambda: (
                None if reference is None else self._program.optimizer_of(reference.parameters())
            )
        )
        comparison.untied(found.untied)
        self._compare_params(comparison, Phase.BUILD)
        self._start = {} if reference is None else _copies(reference)
        for step in range(self._program.steps) if not self._stops(comparison) else ():
            traces = self._train(step)
            if step == 0:
                look_at(found, *traces)
                dtype = max(found.dtypes, key=lambda each: torch.finfo(each).eps)
                found.tolerance = replace(found.tolerance, dtype=dtype)
            comparison = Comparison(found.tolerance, step=step)
            self._compare_losses(comparison, traces if step == 0 else None)
            self._compare_gradients(comparison)
            self._compare_buffers(comparison)
            if not self._stops(comparison):
                jointly(sharded.optimizer.step)
                together(lambda: None if optimizer is None else optimizer.step())
                self._compare_params(comparison, Phase.UPDATE)
            found.largest = comparison.larger(found.largest)
            if self._stops(comparison):
                break
            sharded.optimizer.zero_grad()
            if optimizer is not None:
                optimizer.zero_grad()
        found.differences = comparison.differences
        if reference is not None:
            sharded.look_at_tensors(found, reference)
        return found

    def _stops(self, comparison: Comparison) -> bool:
        return from_first(bool(comparison.differences))

    def _train(self, step: int) -> Traces:
        """Forward and backward of both; returns what their modules did, by the batch's rank."""
        program = self._program
        batch = together(lambda: program.batch_of(step))
        batches = everyones(map_tensors(lambda tensor: tensor.detach().cpu(), batch))
        together(lambda: require_shapes(program, [shapes_of(each) for each in batches]))
        if step == 0:
            self._found.notes += remarks_on(program, [looks_of(each) for each in batches])
        count = program.tokens or (lambda each: 1.0)
        counts = together(lambda: [float(count(each)) for each in batches])
        shares = [each / sum(counts) for each in counts]
        theirs = together(lambda: self._train_reference(step, batches, shares))
        if program.aligned_seeds:
            self._draws.align(step, self._rank, self._world)
        factor = shares[self._rank] * self._world if program.weighted else 1.0
        loss, trace = jointly(lambda: self._train_sharded(batch, factor))
        self._losses = (self._mean, sum(everyones(loss)) / self._world)
        return theirs, everyones(trace)

    def _train_sharded(self, batch: Any, factor: float) -> tuple[float, Trace]:
        model = self._sharded.model
        with traced(self._sharded.named) as trace:
            loss = self._program.loss_of(model, batch) * factor
        loss.backward()
        return loss.item(), trace

    def _train_reference(self, step: int, batches: list[Any], shares: list[float]) -> list[Trace]:
        traces: list[Trace] = []
        self._mean = self._size = 0.0
        if self._reference is None:
            return traces
        for rank, batch in enumerate(batches):
            there = map_tensors(lambda tensor: tensor.to(self._device), batch)
            with self._draws.aside(), Alone():
                if self._program.aligned_seeds:
                    self._draws.align(step, rank, self._world)
                with traced(self._reference) as trace:
                    loss = self._program.loss_of(self._reference, there)
                weight = shares[rank] * self._world
                (loss * weight).backward()
            self._mean += loss.item() * shares[rank]
            self._size += abs(loss.item()) * shares[rank]
            traces.append(trace)
        # Divided here, not the loss: it may have called backward itself, on micro-batches before.
        for param in self._reference.parameters():
            if param.grad is not None:
                param.grad /= self._world
        return traces

    def _compare_losses(self, comparison: Comparison, traces: Traces | None) -> None:
        wanted, came = self._losses
        if self._reference is not None:
            comparison.losses(came, wanted, self._size, traces)

    def _compare_gradients(self, comparison: Comparison) -> None:
        theirs = self._of_reference("gradients")
        comparison.norms(theirs)
        for name in self._sharded.compare_presence(comparison, self._found):
            grad = self._sharded.params[name].grad
            ours = None if grad is None else full(grad)
            if self._reference is not None:
                comparison.tensors(Phase.GRADIENT, name, ours, theirs.get(name))

    def _compare_buffers(self, comparison: Comparison) -> None:
        self._found.apart |= apart(self._sharded.buffers)
        theirs = self._of_reference("buffers")
        if self._reference is None:
            return
        for name, buffer in self._sharded.buffers.items():
            comparison.tensors(Phase.BUFFER, name, buffer, theirs.get(name))

    def _compare_params(self, comparison: Comparison, phase: Phase) -> None:
        theirs = self._of_reference("parameters")
        for name, param in self._sharded.params.items():
            ours = full(param)
            if name in theirs:
                start = self._start.get(name) if phase is Phase.UPDATE else None
                comparison.tensors(phase, name, ours, theirs[name], start)

    def _of_reference(self, what: str) -> dict[str, torch.Tensor | None]:
        model = self._reference
        if model is None:
            return {}
        if what == "buffers":
            return dict(model.named_buffers())
        if what == "gradients":
            return {name: param.grad for name, param in model.named_parameters()}
        return {name: param.detach() for name, param in model.named_parameters()}


def _copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}
