"""The sharded run and the reference, step by step, compared during the run.

Owns the order of a step and of its collectives. Every rank trains the sharded model on its own
batch; rank 0 alone also trains the unsharded one, on all ranks' batches one after another, and
compares. Gathers run in one order on all ranks, which rank 0 determines.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight.compat import drop_hooks
from fullshard.preflight.verification.agree import (
    Alone,
    everyones,
    from_first,
    jointly,
    raise_together,
)
from fullshard.preflight.verification.closer.contributions import Contributions
from fullshard.preflight.verification.closer.look import Look
from fullshard.preflight.verification.comparing.compare import Comparison
from fullshard.preflight.verification.comparing.optimizers import (
    compare_states,
    note_settings,
    settings_of,
    states_of,
)
from fullshard.preflight.verification.comparing.replicas import compare_replicas, differing
from fullshard.preflight.verification.comparing.tensors import full
from fullshard.preflight.verification.comparing.updates import Updates
from fullshard.preflight.verification.draws import Draws
from fullshard.preflight.verification.program import (
    Program,
    looks_of,
    remarks_on,
    require_shapes,
    shapes_of,
)
from fullshard.preflight.verification.recovery import meeting
from fullshard.preflight.verification.room import reference_device
from fullshard.preflight.verification.sharded import Sharded, look_at
from fullshard.preflight.verification.snapshot import in_turn
from fullshard.preflight.verification.tolerance import Tolerance
from fullshard.preflight.verification.trace import Trace, traced
from fullshard.preflight.verification.verdict import Outcome, Phase
from fullshard.sharding import map_tensors

__all__ = ["run"]

Traces = tuple[list[Trace], list[Trace]]

_STEPS_ALONE = (
    "the unsharded model's optimizer",
    "Compute norms with torch's operations on the parameters, which communicate where these are "
    "DTensors",
)


def run(program: Program, stretch: float, look: Look) -> Outcome:
    """Train both ways for ``program.steps`` steps, or to the first that differs; same everywhere.

    Raises:
        Exception: what the user's functions raise; other ranks raise a ``RuntimeError`` about it.
    """
    return from_first(_Runs(program, stretch, look).outcome())


class _Runs:
    def __init__(self, program: Program, stretch: float, look: Look) -> None:
        self._program = program
        self._look = look
        self._world, self._rank = dist.get_world_size(), dist.get_rank()
        self._sharded = Sharded(program)
        home = self._sharded.home
        self._untied: tuple[str, ...] = ()
        self._reference, self._device = raise_together(lambda: self._made_reference(home))
        self._optimizer = raise_together(self._made_optimizer)
        self._draws = Draws(self._device, program.seed)
        self._draws.seed()
        self._contributions = Contributions(self._world)
        self._losses: list[tuple[float, float]] = []
        self._shares: list[float] = []
        self._start: dict[str, torch.Tensor] = {}
        self._found = Outcome(
            tolerance=Tolerance(dtype=self._sharded.dtype, world_size=self._world, stretch=stretch),
            device=str(self._device),
            notes=(
                f"the reference trained on rank 0 ({self._device}), on the batches of "
                f"{self._world} ranks in turn",
            ),
        )
        self._found.seen.untied = self._untied

    def _made_reference(self, home: torch.device) -> tuple[nn.Module | None, torch.device]:
        if self._rank > 0:
            return None, home
        model = self._program.built()
        self._untied = self._sharded.untied(model)
        device = reference_device(model, home)
        model = model.to(device)
        if self._program.unhooked:
            for param in model.parameters():
                drop_hooks(param)
        return model, device

    def _made_optimizer(self) -> torch.optim.Optimizer | None:
        model = self._reference
        return None if model is None else self._program.optimizer_of(model.parameters())

    def outcome(self) -> Outcome:
        """Runs; rank 0's is the one that counts."""
        found = self._found
        comparison = self._comparison(0)
        comparison.untied(found.seen.untied)
        self._compare_params(comparison, Phase.BUILD)
        self._start = {name: each.clone() for name, each in self._of_reference().items()}
        for step in range(self._program.steps) if not self._stops(comparison) else ():
            traces = self._train(step)
            if step == 0:
                look_at(found, *traces)
            comparison = self._comparison(step)
            self._compare_losses(comparison, traces)
            self._compare_gradients(comparison)
            self._compare_buffers(comparison)
            if not self._stops(comparison):
                self._step(comparison)
            found.largest = comparison.larger(found.largest)
            if self._stops(comparison):
                break
            self._sharded.optimizer.zero_grad()
            if self._optimizer is not None:
                self._optimizer.zero_grad()
        found.differences = comparison.differences
        if self._reference is not None:
            self._sharded.look_at_tensors(found.seen, self._reference)
        if self._stops(comparison):
            self._note_settings()
            self._look.conclude(found, comparison, self._contributions, self._sharded)
        return found

    def _comparison(self, step: int) -> Comparison:
        return Comparison(self._found.tolerance, step=step, keeps=self._look.is_closer)

    def _stops(self, comparison: Comparison) -> bool:
        return from_first(bool(comparison.differences))

    # -- training ---------------------------------------------------------------------------------

    def _train(self, step: int) -> Traces:
        """Forward and backward of both; returns what their modules did, by the batch's rank."""
        program, look = self._program, self._look
        batch = raise_together(lambda: program.batch_of(step))
        batches = everyones(map_tensors(lambda tensor: tensor.detach().cpu(), batch))
        raise_together(lambda: require_shapes(program, [shapes_of(each) for each in batches]))
        if step == 0:
            self._found.notes += remarks_on(program, [looks_of(each) for each in batches])
        count = program.tokens or (lambda each: 1.0)
        counts = raise_together(lambda: [float(count(each)) for each in batches])
        self._shares = [each / sum(counts) for each in counts]
        self._contributions = Contributions(self._world, look.keeps)
        look.begin_step(self._sharded)
        theirs = raise_together(lambda: self._train_reference(step, batches))
        self._draws.align(program.seeds, step, self._rank)
        factor = self._shares[self._rank] * self._world if program.weighted else 1.0

        def train() -> tuple[float, Trace]:
            with meeting(step, self._sharded.named):
                return self._train_sharded(batch, factor)

        loss, trace = jointly(train)
        losses = from_first([loss for loss, _ in theirs])
        self._losses = list(zip(everyones(loss), losses, strict=True))
        return [trace for _, trace in theirs], everyones(trace)

    def _train_sharded(self, batch: Any, factor: float) -> tuple[float, Trace]:
        with self._look.forward(self._sharded):
            with traced(self._sharded.named) as trace:
                loss = self._program.loss_of(self._sharded.model, batch) * factor
            loss.backward()
        return loss.item(), trace

    def _train_reference(self, step: int, batches: list[Any]) -> list[tuple[float, Trace]]:
        """Return the loss and the trace of each rank's batch; on rank 0, as others have none."""
        model = self._reference
        if model is None:
            return []
        done = []
        with ExitStack() as stack:
            for handle in self._contributions.follow(dict(model.named_parameters())):
                stack.enter_context(handle)
            for rank, batch in in_turn(model, enumerate(batches)):
                done.append(self._train_on(model, step, rank, batch))
        # Divided here, not the loss: it may have called backward itself, on micro-batches before.
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= self._world
        return done

    def _train_on(self, model: nn.Module, step: int, rank: int, batch: Any) -> tuple[float, Trace]:
        self._contributions.rank = rank
        there = map_tensors(lambda tensor: tensor.to(self._device), batch)
        with ExitStack() as stack:
            stack.enter_context(self._draws.aside())
            stack.enter_context(Alone())
            stack.enter_context(self._program.as_rank(rank))
            self._draws.align(self._program.seeds, step, rank)
            for name, mode in self._program.modes.items():
                model.get_submodule(name).training = mode
            with traced(model) as trace:
                loss = self._program.loss_of(model, there)
            (loss * (self._shares[rank] * self._world)).backward()
        return loss.item(), trace

    def _step(self, comparison: Comparison) -> None:
        """Run the step of both optimizers, on equal gradients, and compare the results."""
        sharded, optimizer = self._sharded, self._optimizer
        self._look.before_update(lambda: Updates(sharded, self._program, self._device))
        jointly(sharded.optimizer.step)

        def step() -> None:
            if optimizer is not None:
                with Alone(*_STEPS_ALONE):
                    optimizer.step()

        raise_together(step)
        self._compare_params(comparison, Phase.UPDATE)
        theirs = {}
        if self._reference is not None and optimizer is not None:
            theirs = states_of(optimizer, dict(self._reference.named_parameters()))
        compare_states(comparison, states_of(sharded.optimizer, sharded.params), theirs)

    # -- comparing --------------------------------------------------------------------------------

    def _compare_losses(self, comparison: Comparison, traces: Traces) -> None:
        if self._reference is None:
            return
        pairs = list(zip(self._losses, self._shares, strict=True))
        came = sum(ours for ours, _ in self._losses) / self._world
        wanted = sum(theirs * share for (_, theirs), share in pairs)
        size = sum(abs(theirs) * share for (_, theirs), share in pairs)
        place = comparison.losses(came, wanted, size, traces)
        self._found.seen.fed = place.fed
        self._found.seen.parts = place.found
        self._found.seen.traced = all(trace.outputs for side in traces for trace in side)
        self._found.seen.losses = tuple(self._losses)

    def _compare_gradients(self, comparison: Comparison) -> None:
        """Compares, and gives the reference the gradients that are found to be equal."""
        model = self._reference
        theirs = {} if model is None else dict(model.named_parameters())
        wanted = {name: param.grad for name, param in theirs.items()}
        comparison.norms(wanted, self._contributions.sizes)
        alike = self._sharded.compare_presence(comparison, self._found.seen)
        for name in alike:
            grad = self._sharded.params[name].grad
            ours = None if grad is None else full(grad)
            self._look.gradient(name, ours)
            if model is not None:
                known = wanted.get(name)
                comparison.tensors(Phase.GRADIENT, name, ours, known)
                if ours is not None and known is not None and ours.shape == known.shape:
                    known.copy_(ours)
        grads = {name: self._sharded.params[name].grad for name in alike}
        compare_replicas(comparison, Phase.GRADIENT, grads)

    def _compare_buffers(self, comparison: Comparison) -> None:
        self._found.seen.apart.update(differing(self._sharded.buffers))
        if self._reference is not None:
            theirs = dict(self._reference.named_buffers())
            for name, buffer in self._sharded.buffers.items():
                comparison.tensors(Phase.BUFFER, name, buffer, theirs.get(name))
        compare_replicas(comparison, Phase.BUFFER, self._sharded.buffers)

    def _compare_params(self, comparison: Comparison, phase: Phase) -> None:
        theirs = self._of_reference()
        for name, param in self._sharded.params.items():
            ours = full(param)
            if name in theirs:
                start = self._start.get(name) if phase is Phase.UPDATE else None
                comparison.tensors(phase, name, ours, theirs[name], start)
        compare_replicas(comparison, phase, self._sharded.params)

    def _of_reference(self) -> dict[str, torch.Tensor]:
        model = self._reference
        named = {} if model is None else dict(model.named_parameters())
        return {name: param.detach() for name, param in named.items()}

    def _note_settings(self) -> None:
        model, optimizer = self._reference, self._optimizer
        theirs = {}
        if model is not None and optimizer is not None:
            theirs = settings_of(optimizer, dict(model.named_parameters()))
        ours = settings_of(self._sharded.optimizer, self._sharded.params)
        note_settings(self._found.seen, ours, theirs)
