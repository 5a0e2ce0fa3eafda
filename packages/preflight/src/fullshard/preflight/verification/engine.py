"""The sharded run and the reference, step by step, compared during the run.

Owns the order of a step and of its collectives. Every rank trains the sharded model on its own
batch; rank 0 alone also trains the unsharded one, on all ranks' batches one after another, and
compares. Gathers run in one order on all ranks, which rank 0 determines.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count

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
from fullshard.preflight.verification.comparing.tensors import full, generators_mark
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
from fullshard.preflight.verification.room import (
    COPIES,
    COPIES_OF_STEP,
    reference_device,
)
from fullshard.preflight.verification.sharded import Sharded, look_at, look_at_draws
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


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step in progress.

    Attributes:
        number: from 0.
        ours: the losses of the sharded model.
        theirs: the losses of the reference by the rank whose batch it has; on rank 0.
    """

    number: int
    ours: Iterator[torch.Tensor]
    theirs: list[Iterator[torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class _Ran:
    """A forward and backward of one batch: the loss, and what the modules did."""

    loss: float
    trace: Trace


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
        model = self._reference
        made = raise_together(lambda: None if model is None else program.optimizers_of(model))
        self._optimizers = made or []
        self._draws = Draws(self._device, program.seed)
        self._draws.seed()
        self._contributions = Contributions(self._world)
        self._losses: list[tuple[float, float]] = []
        self._shares: list[float] = []
        self._dtypes: tuple[set[torch.dtype], set[torch.dtype]] = (set(), set())
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
        copies = COPIES if self._program.step is None else COPIES_OF_STEP
        device = reference_device(model, home, copies=copies)
        model = model.to(device)
        if self._program.unhooked:
            for param in model.parameters():
                drop_hooks(param)
        return model, device

    def outcome(self) -> Outcome:
        """Runs; rank 0's is the one that counts."""
        found = self._found
        comparison = self._comparison(0)
        comparison.untied(found.seen.untied)
        self._compare_params(comparison, Phase.BUILD)
        self._compare_buffers(comparison, Phase.BUILD)
        self._start = {name: each.clone() for name, each in self._of_reference().items()}
        for step in range(self._program.steps) if not self._stops(comparison) else ():
            comparison = self._run_step(self._begin(step))
            if self._stops(comparison):
                break
        found.differences = comparison.differences
        if self._reference is not None:
            self._sharded.look_at_tensors(found.seen, self._reference)
        if self._stops(comparison):
            self._note_settings()
            self._look.conclude(found, comparison, self._contributions, self._sharded)
        return found

    def _run_step(self, run: _Step) -> Comparison:
        """Train a step both ways; return what was compared last."""
        found, comparison = self._found, self._comparison(run.number)
        for stage in count(1):
            traces = self._train(run)
            if traces is None:
                break
            if run.number == 0:
                self._look_at(traces)
            comparison = self._comparison(run.number)
            if stage > 1:  # optimizers stepped since the last loss
                self._compare_updates(comparison)
            self._compare_losses(comparison, traces, "loss" if stage == 1 else f"loss {stage}")
            self._compare_gradients(comparison)
            self._compare_buffers(comparison)
            found.largest = comparison.larger(found.largest)
            if self._stops(comparison):
                return comparison
            if self._program.step is None:
                self._step()
                break
        self._compare_updates(comparison)
        if self._program.step is not None:
            self._compare_buffers(comparison)
        found.largest = comparison.larger(found.largest)
        if self._program.step is None and not self._stops(comparison):
            for each in (*self._sharded.optimizers, *self._optimizers):
                each.zero_grad()
        return comparison

    def _comparison(self, step: int) -> Comparison:
        return Comparison(self._found.tolerance, step=step, keeps=self._look.is_closer)

    def _stops(self, comparison: Comparison) -> bool:
        return from_first(bool(comparison.differences))

    # -- training ---------------------------------------------------------------------------------

    def _begin(self, step: int) -> _Step:
        """Return the step, of which nothing ran; all ranks call it."""
        program = self._program
        batch = raise_together(lambda: program.batch_of(step))
        batches = everyones(map_tensors(lambda tensor: tensor.detach().cpu(), batch))
        raise_together(lambda: require_shapes(program, [shapes_of(each) for each in batches]))
        if step == 0:
            self._found.notes += remarks_on(program, [looks_of(each) for each in batches])
        of_batch = program.tokens or (lambda each: 1.0)
        counts = raise_together(lambda: [float(of_batch(each)) for each in batches])
        self._shares = [each / sum(counts) for each in counts]
        theirs = []
        if self._reference is not None:
            for each in batches:
                there = map_tensors(lambda tensor: tensor.to(self._device), each)
                theirs.append(program.losses_of(self._reference, self._optimizers, there))
        ours = program.losses_of(self._sharded.model, self._sharded.optimizers, batch)
        return _Step(number=step, ours=ours, theirs=theirs)

    def _train(self, run: _Step) -> Traces | None:
        """Run both to their next loss, and its backward; None if the step has ended.

        Returns what their modules did, by the batch's rank; all ranks call it.
        """
        program, look = self._program, self._look
        self._contributions = Contributions(self._world, look.keeps)
        look.begin_step(self._sharded)
        theirs = raise_together(lambda: self._train_reference(run))
        self._draws.align(program.seeds, run.number, self._rank)
        factor = self._shares[self._rank] * self._world if program.weighted else 1.0

        before = generators_mark()

        def train() -> _Ran | None:
            with meeting(run.number, self._sharded.named):
                return self._train_sharded(run.ours, factor)

        both = from_first(theirs), everyones(jointly(train))
        look_at_draws(self._found, before)
        unsharded, sharded = ([each for each in side if each is not None] for side in both)
        if not (unsharded or sharded):
            return None
        if len(unsharded) + len(sharded) < 2 * self._world:
            ended = [[r for r, each in enumerate(side) if each is None] for side in both]
            raise RuntimeError(
                f"step has yielded its last loss on ranks {ended[1]}, and unsharded for batches "
                f"of ranks {ended[0]}, and not on the others; yield as many losses on all ranks"
            )
        pairs = zip(sharded, unsharded, strict=True)
        self._losses = [(ours.loss, theirs.loss) for ours, theirs in pairs]
        return [each.trace for each in unsharded], [each.trace for each in sharded]

    def _train_sharded(self, losses: Iterator[torch.Tensor], factor: float) -> _Ran | None:
        with self._look.forward(self._sharded), traced(self._sharded.named) as trace:
            loss = next(losses, None)
            if loss is None:
                return None
            loss = loss * factor
            loss.backward()
        return _Ran(loss=loss.item(), trace=trace)

    def _train_reference(self, run: _Step) -> list[_Ran | None]:
        """Return what it did on each rank's batch; on rank 0, as others have none."""
        model = self._reference
        if model is None:
            return []
        done, sums = [], dict[nn.Parameter, torch.Tensor]()
        stepping = self._optimizers if self._program.step is not None else ()
        with ExitStack() as stack:
            for handle in self._contributions.follow(dict(model.named_parameters())):
                stack.enter_context(handle)
            for rank, losses in in_turn(model, enumerate(run.theirs), stepping):
                done.append(self._train_on(model, run.number, rank, losses))
                for param in model.parameters() if stepping else ():
                    if param.grad is not None:
                        before = sums.get(param)
                        sums[param] = param.grad.clone() if before is None else before + param.grad
        # Divided here, not the loss: it may have called backward itself, on micro-batches before.
        for param in model.parameters():
            if stepping:
                param.grad = sums.get(param)
            if param.grad is not None:
                param.grad /= self._world
        return done

    def _train_on(
        self, model: nn.Module, step: int, rank: int, losses: Iterator[torch.Tensor]
    ) -> _Ran | None:
        self._contributions.rank = rank
        with ExitStack() as stack:
            stack.enter_context(self._draws.aside())
            stack.enter_context(Alone())
            stack.enter_context(self._program.as_rank(rank))
            self._draws.align(self._program.seeds, step, rank)
            for name, mode in self._program.modes.items():
                model.get_submodule(name).training = mode
            self._program.prepare(model, rank)
            with traced(model) as trace:
                loss = next(losses, None)
            if loss is None:
                return None
            (loss * (self._shares[rank] * self._world)).backward()
        return _Ran(loss=loss.item(), trace=trace)

    def _step(self) -> None:
        """Run the step of both optimizers, on equal gradients."""
        sharded = self._sharded
        self._look.before_update(lambda: Updates(sharded, self._program, self._device))
        jointly(sharded.optimizers[0].step)

        def step() -> None:
            with Alone(*_STEPS_ALONE):
                for each in self._optimizers:
                    each.step()

        raise_together(step)

    # -- comparing --------------------------------------------------------------------------------

    def _look_at(self, traces: Traces) -> None:
        """Note what the modules of both did; dtypes are those of the step so far."""
        for side, known in zip(traces, self._dtypes, strict=True):
            for trace in side:
                known |= trace.dtypes
                trace.dtypes |= known
        look_at(self._found, *traces)

    def _compare_losses(self, comparison: Comparison, traces: Traces, name: str) -> None:
        if self._reference is None:
            return
        pairs = list(zip(self._losses, self._shares, strict=True))
        came = sum(ours for ours, _ in self._losses) / self._world
        wanted = sum(theirs * share for (_, theirs), share in pairs)
        size = sum(abs(theirs) * share for (_, theirs), share in pairs)
        place = comparison.losses(name, came, wanted, size, traces)
        self._found.seen.fed = place.fed
        self._found.seen.given = place.given
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

    def _compare_buffers(self, comparison: Comparison, phase: Phase = Phase.BUFFER) -> None:
        self._found.seen.apart.update(differing(self._sharded.buffers))
        if self._reference is not None:
            theirs = dict(self._reference.named_buffers())
            for name, buffer in self._sharded.buffers.items():
                comparison.tensors(phase, name, buffer, theirs.get(name))
        compare_replicas(comparison, phase, self._sharded.buffers)

    def _compare_updates(self, comparison: Comparison) -> None:
        """Compare what the optimizers made and keep."""
        self._compare_params(comparison, Phase.UPDATE)
        model = self._reference
        named = {} if model is None else dict(model.named_parameters())
        theirs = states_of(self._optimizers, named)
        ours = states_of(self._sharded.optimizers, self._sharded.params)
        compare_states(comparison, ours, theirs)

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
        model = self._reference
        named = {} if model is None else dict(model.named_parameters())
        theirs = settings_of(self._optimizers, named)
        ours = settings_of(self._sharded.optimizers, self._sharded.params)
        note_settings(self._found.seen, ours, theirs)
        self._sharded.look_at_modules(self._found.seen, model)
