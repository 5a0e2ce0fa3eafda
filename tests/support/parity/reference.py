"""The right results, computed in one process in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from support.parity.compare import (
    Tensors,
    Tolerance,
    assert_equal,
    gradients_of,
    mean_over_ranks,
    parameters_of,
    rounding,
)
from support.parity.engines import tell
from support.parity.models import ROWS, Batch, Case, build

Rows = slice
whole_batch = slice(None)


def my_rows(rank: int | None = None, world_size: int | None = None) -> Rows:
    """The rows of a whole batch that a rank sees: this one, unless told otherwise."""
    rank = dist.get_rank() if rank is None else rank
    each = ROWS // (dist.get_world_size() if world_size is None else world_size)
    return slice(rank * each, (rank + 1) * each)


def rows_of(batch: Batch, rows: Rows) -> Batch:
    """These rows of a batch."""
    return batch[0][rows], batch[1][rows]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with ``lr == eps``, so that rounding is not blown up; see [Note: tolerance]."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trainable, lr=1e-2, eps=1e-2, weight_decay=0.1)


@dataclass
class History:
    """What a run left: per step loss and gradients, the parameters after the last."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    parameters: Tensors = field(default_factory=dict)


def train(
    model: nn.Module,
    case: Case,
    rows: Rows,
    *,
    steps: int = 10,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> History:
    """Trains on ``rows`` of batch 0, 1, ...; gradients are read after each backward."""
    history = History()
    stepper = optimizer(model)
    for step in range(steps):
        inputs, targets = rows_of(case.batch(step, dtype), rows)
        outputs = model(inputs)
        loss = case.loss(outputs, targets.to(outputs.device))
        loss.backward()
        history.losses.append(loss.detach())
        history.gradients.append(gradients_of(model))
        stepper.step()
        stepper.zero_grad()
    history.parameters = parameters_of(model)
    return history


def accumulate(model: nn.Module, case: Case, rows: Rows, *, steps: int) -> tuple[Tensors, Tensors]:
    """Steps once after every two backwards; the last gradients, and the parameters after them."""
    stepper = adamw(model)
    gradients: Tensors = {}
    for step in range(steps):
        tell(model, "set_requires_gradient_sync", step % 2 == 1)
        inputs, targets = rows_of(case.batch(step, torch.float32), rows)
        case.loss(model(inputs), targets).backward()
        if step % 2:
            gradients = gradients_of(model)
            stepper.step()
            stepper.zero_grad()
    return gradients, parameters_of(model)


def compare(
    got: History, want: History, tolerance: Tolerance, *, average: bool = True, grow: bool = True
) -> None:
    """Compares two runs step by step.

    Args:
        got: the sharded run.
        want: the reference.
        tolerance: for the first step.
        average: compare the mean of the ranks' losses, not this rank's own.
        grow: let the tolerance grow with the number of optimizer steps behind a value.
    """
    for step, (loss, expected) in enumerate(zip(got.losses, want.losses, strict=True)):
        allowed = _after(tolerance, step + 1) if grow else tolerance
        value = mean_over_ranks(loss) if average else loss
        assert_equal({"loss": value}, {"loss": expected}, allowed, f"loss at step {step}")
        assert_equal(got.gradients[step], want.gradients[step], allowed, f"gradients, step {step}")
    steps = len(want.losses) + 1 if grow else 1
    assert_equal(got.parameters, want.parameters, _after(tolerance, steps), "parameters")


def _after(tolerance: Tolerance, steps: int) -> Tolerance:
    return Tolerance(
        units=tolerance.units * steps, floor=tolerance.floor, overrides=tolerance.overrides
    )


class Pair:
    """A sharded model and the unsharded one: each learns a batch, by its rows or as a whole.

    Attributes:
        model: the sharded one.
        whole: the unsharded one.
    """

    def __init__(self, case: Case, model: nn.Module, dtype: torch.dtype = torch.float64) -> None:
        self.case, self.dtype = case, dtype
        self.model, self.whole = model, build(case, dtype)
        self._optimizers = adamw(self.model), adamw(self.whole)
        self._backwards = 0

    def losses(self, index: int) -> list[torch.Tensor]:
        """The losses of batch ``index``: of this rank's rows by the model, of all by the whole."""
        found = []
        for model, rows in ((self.model, my_rows()), (self.whole, whole_batch)):
            inputs, targets = rows_of(self.case.batch(index, self.dtype), rows)
            outputs = model(inputs)
            found.append(self.case.loss(outputs, targets.to(outputs.device)))
        return found

    def backward(self, *indices: int) -> None:
        """Forward and backward of each of these batches."""
        for index in indices:
            for loss in self.losses(index):
                loss.backward()
            self._backwards += 1

    def step(self) -> None:
        """The step of an optimizer each, which drops the gradients."""
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self, steps: int | None = None, *, what: str = "") -> None:
        """The gradients and parameters are equal; ``steps``: as rounded, else of each backward."""
        allowed = rounding(dist.get_world_size(), steps=steps or self._backwards + 1)
        for kind, read in (("gradients", gradients_of), ("parameters", parameters_of)):
            found = {
                name.replace("_checkpoint_wrapped_module.", ""): tensor
                for name, tensor in read(self.model).items()
            }
            assert_equal(found, read(self.whole), allowed, f"{what} {kind}")


class ByHand:
    """Data parallel training by its definition, one process playing all ranks in turn.

    Each rank has a replica with its own buffers. A step casts the masters to ``param_dtype``, runs
    each replica on its rows cast alike, casts its gradients to ``reduce_dtype``, adds them in that
    dtype, divides, and gives the result to the masters in their dtype. None leaves a dtype as it
    is.

    Attributes:
        masters: the model that an optimizer may step.
        losses: per rank, that of the last ``backward``.
    """

    def __init__(
        self,
        case: Case,
        world_size: int,
        *,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = torch.float32,
        divide_factor: float | None = None,
    ) -> None:
        self.case = case
        self.world_size = world_size
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self.divide_factor = world_size if divide_factor is None else divide_factor
        self.masters = build(case, dtype)
        self.replicas = [copy.deepcopy(self.masters) for _ in range(world_size)]
        if param_dtype is not None:
            for replica in self.replicas:
                replica.to(param_dtype)
        self.losses: list[torch.Tensor] = []
        self._waiting: list[dict[int, torch.Tensor]] = [{} for _ in self.replicas]

    def backward(self, index: int, *, synchronise: bool = True) -> None:
        """Adds the gradient of batch ``index`` to the masters' ``grad``.

        Without ``synchronise`` each rank keeps its own sum, in the reduce dtype.
        """
        self.losses = [self._run(rank, index) for rank in range(self.world_size)]
        for rank, replica in enumerate(self.replicas):
            self._collect(self._waiting[rank], replica)
        if not synchronise:
            return
        ranks, self._waiting = self._waiting, [{} for _ in self.replicas]
        for position, master in enumerate(self.masters.parameters()):
            reduced = self._reduce([gradients.get(position) for gradients in ranks])
            if reduced is not None:
                master.grad = _add(master.grad, reduced.to(master.dtype))

    def _run(self, rank: int, index: int) -> torch.Tensor:
        replica = self.replicas[rank]
        with torch.no_grad():
            for copied, master in zip(replica.parameters(), self.masters.parameters(), strict=True):
                copied.copy_(master)
        inputs, targets = rows_of(
            self.case.batch(index, torch.float32), my_rows(rank, self.world_size)
        )
        if self.param_dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self.param_dtype)
        loss = self.case.loss(replica(inputs), targets)
        loss.backward()
        return loss.detach()

    def _collect(self, waiting: dict[int, torch.Tensor], replica: nn.Module) -> None:
        """Adds a replica's gradients to what waits in the reduce dtype, rounding once each."""
        for position, parameter in enumerate(replica.parameters()):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            if position in waiting:
                waiting[position] += gradient
            else:
                waiting[position] = gradient.to(self.reduce_dtype or gradient.dtype)

    def _reduce(self, gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
        total: torch.Tensor | None = None
        for gradient in gradients:
            total = _add(total, gradient)
        return None if total is None else total / self.divide_factor


def _add(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if total is None or more is None:
        return more if total is None else total
    return total + more
