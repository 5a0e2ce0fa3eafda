"""Both runs, one step of each after the other, compared as they go.

Owns the order of a step and of its collectives. Every rank trains the sharded model on its own
batch; rank 0 alone also trains the unsharded one, on all ranks' batches one after another, and
compares. Whatever must be gathered is gathered by all ranks in one order, which rank 0 says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.preflight.verification.agree import everyones, from_first, together
from fullshard.preflight.verification.compare import Comparison
from fullshard.preflight.verification.draws import Draws
from fullshard.preflight.verification.names import clean
from fullshard.preflight.verification.program import Program
from fullshard.preflight.verification.room import reference_device
from fullshard.preflight.verification.tolerance import Tolerance
from fullshard.preflight.verification.trace import Trace, fingerprint, traced
from fullshard.preflight.verification.verdict import Difference, Phase
from fullshard.sharding import map_tensors

__all__ = ["Outcome", "run"]


@dataclass(kw_only=True)
class Outcome:
    """What one run of both found.

    Attributes:
        differences: all of the first step that has any, in the order of the phases.
        largest: what came nearest to the tolerance.
        tolerance: what counted as equal.
        device: where the reference trained.
        dtypes: the coarsest dtypes of the reference and of the sharded model.
        skipped: modules that some ranks ran and others not.
        apart: parameters and buffers that are plain tensors, and not the same on all ranks.
    """

    differences: list[Difference] = field(default_factory=list)
    largest: Difference | None = None
    tolerance: Tolerance
    device: str = ""
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    skipped: tuple[str, ...] = ()
    apart: frozenset[str] = frozenset()

    @property
    def first(self) -> Difference | None:
        """The first difference."""
        return self.differences[0] if self.differences else None

    @property
    def reached(self) -> tuple[int, int]:
        """How far both agreed: the step and the phase of the first difference."""
        if self.first is None:
            return 1 << 30, 0
        return self.first.step, list(Phase).index(self.first.phase)


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
        self._stretch = stretch
        model = together(program.built)
        sharded = together(lambda: program.shard(model))
        self._model = sharded if isinstance(sharded, nn.Module) else model
        self._params = {clean(name): each for name, each in self._model.named_parameters()}
        self._buffers = {clean(name): each for name, each in self._model.named_buffers()}
        self._optimizer = together(lambda: program.optimizer(self._params.values()))
        self._reference, self._device = self._made_reference()
        self._draws = Draws(program.seed, self._device)
        self._mean = self._size = 0.0

    def _made_reference(self) -> tuple[nn.Module | None, torch.device]:
        home = next((each.device for each in self._params.values()), torch.device("cpu"))

        def make() -> tuple[nn.Module | None, torch.device]:
            if self._rank > 0:
                return None, home
            model = self._program.built()
            names, own = set(dict(model.named_parameters())), set(self._params)
            if names != own:
                raise ValueError(
                    f"shard changed the names of parameters: {sorted(names ^ own)[:4]} are in one "
                    "of the models only; return the model with its own parameters"
                )
            device = reference_device(model, home)
            return model.to(device), device

        return together(make)

    def outcome(self) -> Outcome:
        """Runs; rank 0's is the one that counts."""
        reference = self._reference
        dtype = next(
            (each.dtype for each in self._params.values() if each.is_floating_point()),
            torch.float32,
        )
        tolerance = Tolerance(dtype=dtype, world_size=self._world, stretch=self._stretch)
        found = Outcome(tolerance=tolerance, device=str(self._device))
        comparison = Comparison(tolerance, step=0)
        optimizer = together(
            lambda: None if reference is None else self._program.optimizer(reference.parameters())
        )
        self._compare_params(comparison, Phase.BUILD)
        self._start = {} if reference is None else _copies(reference)
        for step in range(self._program.steps) if not self._stops(comparison) else ():
            traces = self._train(step)
            if step == 0:
                tolerance = self._looked_at(traces, found)
            comparison = Comparison(tolerance, step=step)
            self._compare_losses(comparison, traces if step == 0 else None)
            self._compare_gradients(comparison, found)
            self._compare_buffers(comparison, found)
            if not self._stops(comparison):
                together(lambda: self._optimizer.step())
                together(lambda: None if optimizer is None else optimizer.step())
                self._compare_params(comparison, Phase.UPDATE)
            found.largest = comparison.larger(found.largest)
            if self._stops(comparison):
                break
            self._optimizer.zero_grad()
            if optimizer is not None:
                optimizer.zero_grad()
        found.differences = comparison.differences
        return found

    def _stops(self, comparison: Comparison) -> bool:
        return from_first(bool(comparison.differences))

    def _train(self, step: int) -> tuple[list[Trace], list[Trace]]:
        """Forward and backward of both; returns what their modules did, by the batch's rank."""
        program = self._program
        batch = together(lambda: program.batch_of(step))
        batches = everyones(map_tensors(lambda tensor: tensor.detach().cpu(), batch))
        together(lambda: self._check_shapes(batches))
        count = program.tokens or (lambda each: 1.0)
        counts = together(lambda: [float(count(each)) for each in batches])
        shares = [each / sum(counts) for each in counts]
        theirs = together(lambda: self._train_reference(step, batches, shares))
        if program.aligned_seeds:
            self._draws.align(step, self._rank, self._world)
        with traced(self._model) as trace:
            loss = program.loss_of(self._model, batch)
        if program.weighted:
            loss = loss * (shares[self._rank] * self._world)
        loss.backward()
        self._losses = (self._mean, sum(everyones(loss.item())) / self._world)
        return theirs, everyones(trace)

    def _check_shapes(self, batches: list[Any]) -> None:
        if self._program.tokens is not None:
            return
        shapes = [_shapes(each) for each in batches]
        for rank, each in enumerate(shapes):
            if each != shapes[0]:
                raise ValueError(
                    f"rank {rank}'s batch has shapes {each}, rank 0's has {shapes[0]}; means over "
                    "them weigh differently. Give all ranks equal shapes, or pass tokens=, a "
                    "function that says how many items of a batch count"
                )

    def _train_reference(self, step: int, batches: list[Any], shares: list[float]) -> list[Trace]:
        traces: list[Trace] = []
        self._mean = self._size = 0.0
        if self._reference is None:
            return traces
        for rank, batch in enumerate(batches):
            there = map_tensors(lambda tensor: tensor.to(self._device), batch)
            with self._draws.aside():
                if self._program.aligned_seeds:
                    self._draws.align(step, rank, self._world)
                with traced(self._reference) as trace:
                    loss = self._program.loss_of(self._reference, there) * shares[rank]
                loss.backward()
            self._mean += loss.item()
            self._size += abs(loss.item())
            traces.append(trace)
        return traces

    def _looked_at(self, traces: tuple[list[Trace], list[Trace]], found: Outcome) -> Tolerance:
        """Notes what the first forward shows; returns the tolerance that follows."""
        theirs, ours = traces
        ran = [list(each.outputs) for each in ours]
        everywhere = set(ran[0]).intersection(*ran[1:])
        names = dict.fromkeys(name for each in ran for name in each if name not in everywhere)
        found.skipped = tuple(names)
        dtypes = [set().union(*(each.dtypes for each in side)) for side in (theirs, ours)]
        found.dtypes = (_coarsest(dtypes[0]), _coarsest(dtypes[1]))
        found.tolerance = Tolerance(
            dtype=_coarsest(dtypes[0] | dtypes[1]),
            world_size=self._world,
            stretch=self._stretch,
        )
        return found.tolerance

    def _compare_losses(
        self, comparison: Comparison, traces: tuple[list[Trace], list[Trace]] | None
    ) -> None:
        wanted, came = self._losses
        if self._reference is not None:
            comparison.losses(came, wanted, self._size, traces)

    def _compare_gradients(self, comparison: Comparison, found: Outcome) -> None:
        gradients = {name: param.grad for name, param in self._params.items()}
        has = everyones({name for name, grad in gradients.items() if grad is not None})
        plain = {
            name: grad
            for name, grad in gradients.items()
            if grad is not None and not isinstance(grad, DTensor)
        }
        found.apart |= self._apart(plain)
        theirs = self._of_reference("gradients")
        comparison.norms(theirs)
        for name, grad in gradients.items():
            ranks = [rank for rank, names in enumerate(has) if name in names]
            if 0 < len(ranks) < self._world:
                comparison.missing(name, f"only ranks {ranks} have a gradient of {name}")
                continue
            ours = None if grad is None else _full(grad)
            if self._reference is not None:
                comparison.tensors(Phase.GRADIENT, name, ours, theirs.get(name))

    def _compare_buffers(self, comparison: Comparison, found: Outcome) -> None:
        found.apart |= self._apart(self._buffers)
        theirs = self._of_reference("buffers")
        if self._reference is None:
            return
        for name, buffer in self._buffers.items():
            comparison.tensors(Phase.BUFFER, name, buffer, theirs.get(name))

    def _compare_params(self, comparison: Comparison, phase: Phase) -> None:
        theirs = self._of_reference("parameters")
        for name, param in self._params.items():
            ours = _full(param)
            if self._reference is not None:
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

    def _apart(self, tensors: dict[str, torch.Tensor]) -> frozenset[str]:
        """The names of plain tensors that are not the same on all ranks."""
        prints = everyones({name: fingerprint(each) for name, each in tensors.items()})
        return frozenset(
            name
            for name in tensors
            if any(
                name not in other or not torch.equal(other[name], prints[0].get(name, other[name]))
                for other in prints
            )
        )


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tuple(tensor.shape))
        return tensor

    map_tensors(look, batch)
    return found


def _coarsest(dtypes: set[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
