"""The sharded run and the unsharded one, side by side."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from support.fuzz.around import Around, AroundCase
from support.fuzz.blocks import BlockCase, open_block
from support.fuzz.case import FuzzCase, repeated_runs
from support.fuzz.model import optimizer_of, sharded
from support.fuzz.more import PLAIN, Averages, Kept, MoreCase, Outcome, Program
from support.fuzz.oracle import Oracle
from support.parity.compare import EXACT, Tolerance, assert_equal, full

__all__ = ["Pair", "ShardedRun"]

STEP_UNITS = 256  # eps of a tensor's largest value
LARGEST = 10.0  # parameter of a model that has not diverged; they begin below 1


class ShardedRun(NamedTuple):
    """A sharded model, its optimizer, and what is around them."""

    around: Around
    model: Any
    optimizer: Any


class Pair:
    """Both runs of one case.

    Attributes:
        case: the case.
        drawn: what is around the first sharded run.
        folder: for files.
        run: the sharded run; state may move into another one.
        oracle: the unsharded run.
        rng: draws details of events, alike on all ranks.
        step: the number of the step.
        program: what else it does.
        scaler: of the sharded run.
        averages: those of both, if the program keeps any.
        runs: how often a forward passes on the error ``e`` that earlier steps left in the weights.
            ``n`` runs of a layer multiply by them ``n`` times, and so by ``(1 + e) ** n``. Errors
            of layers that run once are independent of each other; the units of a step cover them.
        alive: forwards of which everything is kept, with graphs that no backward uses.
    """

    def __init__(
        self, case: FuzzCase, drawn: AroundCase, folder: Path, more: MoreCase = PLAIN
    ) -> None:
        self.case, self.drawn, self.folder = case, drawn, folder
        self.program = Program(case, more)
        self.run = self.build(drawn)
        self.oracle = Oracle(case, drawn, self.program)
        self.rng = random.Random(f"events {case.seed}")
        self.step = 0
        self.runs = max(1, sum(map(repeated_runs, case.nodes)))
        self.scaler = self.program.scaler()
        self.averages: Averages | None = None
        self.alive: list[Outcome] = []
        self._kept: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
        self.forget_averages()

    def forget_averages(self) -> None:
        """Begin averages anew: those of other parameters are of no use."""
        if self.program.more.averages:
            self.averages = Averages(*self.models)

    def build(self, drawn: AroundCase) -> ShardedRun:
        """Return a new sharded run."""
        around = Around(drawn, self.case, self.folder)
        model = sharded(self.case, around)
        optimizer = around.wrap(optimizer_of(model, self.case, drawn), model)
        return ShardedRun(around, model, optimizer)

    def shared_folder(self, name: str) -> Path:
        """Return a new folder that all ranks see."""
        found: list[Any] = [str(self.folder / name)]
        dist.broadcast_object_list(found, src=0)
        return Path(found[0])

    @property
    def models(self) -> tuple[Any, nn.Module]:
        """The sharded model and the other."""
        return self.run.model, self.oracle.model

    @property
    def optimizers(self) -> tuple[Optimizer, Optimizer]:
        """The optimizers of both."""
        return self.run.optimizer, self.oracle.optimizer

    @property
    def scalers(self) -> tuple[torch.amp.GradScaler, torch.amp.GradScaler]:
        """The scalers of both."""
        return self.scaler, self.oracle.scaler

    @property
    def tolerance(self) -> Tolerance:
        """How far apart rounding may bring both.

        Each step adds ``STEP_UNITS``, and passes on what was there ``runs`` times.
        """
        dtype = torch.float32 if self.drawn.mixed else None
        units = STEP_UNITS * sum(self.runs**step for step in range(self.step + 1))
        return Tolerance(units=units, overrides=dtype)

    def outcome(self, micro: int) -> Outcome:
        """Return what the sharded model gives for this rank's part of a micro-batch."""
        return self.program.outcome(self.run.model, self.scaler, dist.get_rank(), self.step, micro)

    def pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Return each parameter of the sharded model, and that of the other."""
        mine, theirs = self.models
        for (name, param), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            yield name, param, other

    def compare_gradients(self, what: str) -> None:
        """Compare the gradients of both."""
        pairs = list(self.pairs())
        got = {n: None if a.grad is None else full(a.grad) for n, a, _ in pairs}
        want = {n: b.grad for n, _, b in pairs}
        assert_equal(got, want, self.tolerance, f"gradients, {what}")

    def compare_parameters(self, what: str) -> None:
        """Compare the parameters of both."""
        pairs = list(self.pairs())
        got = {n: full(a) for n, a, _ in pairs}
        want = {n: b.detach() for n, _, b in pairs}
        assert_equal(got, want, self.tolerance, f"parameters, {what}")

    def has_diverged(self) -> bool:
        """Return whether the unsharded model has diverged: from there on rounding grows freely."""
        return any(param.abs().max() > LARGEST for param in self.oracle.model.parameters())

    def compare_evaluations(self, micro: int) -> None:
        """Compare forwards without gradients."""
        place = dist.get_rank(), self.step, micro
        got = self.program.evaluated(self.run.model, *place)
        want = self.program.evaluated(self.oracle.computing(), *place)
        self.compare_outcomes(got, want, "evaluation")

    def compare_outcomes(self, got: Outcome, want: Outcome, what: str) -> None:
        """Compare what forwards gave, and what is in the objects that their layers filled."""
        what = f"{what} of step {self.step}"
        assert got.names() == want.names(), f"{what}: {got.names()}, not {want.names()}"
        assert_equal(got.tensors(), want.tensors(), self.tolerance, what)

    def keep(self, got: Outcome) -> None:
        """Keep what the program keeps of a forward; remember its values."""
        kept, live = self.program.more.kept, dict[str, torch.Tensor]()
        if kept in (Kept.LOSS, Kept.ALL) and got.loss.isfinite():
            live["loss"] = got.loss
        if kept in (Kept.OUTPUT, Kept.ALL):
            live["output"] = got.out
        if kept is Kept.ALL:
            self.alive.append(got)
        self._kept.append((live, {name: full(each) for name, each in live.items()}))

    def compare_kept(self) -> None:
        """Raise if what was kept has changed."""
        for live, values in self._kept:
            assert_equal(live, values, EXACT, f"kept after step {self.step}")

    def open_block(self, block: BlockCase, names: list[str], fresh: bool) -> Callable[[], None]:
        """Open a block of the sharded model; return what does the same to the unsharded one.

        Args:
            block: what to do.
            names: the parameters of which one may be written.
            fresh: whether both models have the same parameters now.
        """

        def compare(opened: nn.Module, path: str) -> None:
            got = {name: full(each) for name, each in opened.named_parameters()}
            other = self.oracle.model.get_submodule(path)
            want = {n: each.detach().to(got[n].dtype) for n, each in other.named_parameters()}
            if fresh:
                assert_equal(got, want, self.tolerance, f"a block in step {self.step}")

        return open_block(block, self.models, names, compare)
