"""SOAP on sharded parameters: Adam in the eigenbasis of Shampoo, on the rank that owns a matrix.

Owns the optimizer: groups and their options, where its state is, and what becomes of the owner's
result. The rule for one matrix is ``preconditioned``'s affair.

[Note: owned state] Averages and preconditioners of a matrix live on its owner alone. ``state``
holds tensors without memory instead, on the meta device, since programs read there which keys
exist. ``state_dict()`` lays the values over the ranks: averages as the parameter is cut,
preconditioners evenly. Loading puts such tensors into ``state``, and the next step brings them to
the owners that there are then. When other parameters have gradients than in the step before, owners
may change: all is laid over the ranks, and brought to the new ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fullshard.optim.base.loading import Shapes
from fullshard.optim.base.options import require_count
from fullshard.optim.base.stepped import Stepped, label_of
from fullshard.optim.owned_state import (
    Scheduled,
    as_matrix,
    loaded,
    require_fits,
    shapes_of,
)
from fullshard.optim.owners.matrices import Split, matrix_shape
from fullshard.optim.owners.matrix_exchange import Arrived, Batch
from fullshard.optim.owners.optimizer import MatrixOptimizer, MatrixWork
from fullshard.optim.owners.owner_layout import Laid, Laying, Owned
from fullshard.optim.owners.schedule import Job, Schedule
from fullshard.optim.preconditioned import flops_of, new_state, start, update_of
from fullshard.sharding.spi import local_of

__all__ = ["SOAP"]

_MOST = 10**9
_NONE = torch.empty(0, device="meta")  # of what was never stepped
_REAL = torch.empty(0)


class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioners: the same on every mesh as on the whole.

    N. Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv 2409.11321),
    algorithm 3. As in the authors' program (github.com/nikhilvyas/SOAP, commit f42d296), the
    first step only fills the preconditioners and changes no matrix, and decay comes after the
    update. Gradients travel to the matrix's owner in
    fp32, and updates back: 8 (W-1)/W bytes per element for W ranks. The owner keeps, in fp32, two
    averages and four square matrices, ``8 (r c + r r + c c)`` bytes for ``r`` rows and ``c``
    columns; no other rank does. A group with ``algorithm="adamw"`` is stepped by AdamW, with
    ``lr``, ``betas``, ``eps`` and ``weight_decay``; see ``matrix_groups``. 3-D parameters are
    matrices side by side, ``[experts, rows, columns]``.

    Args:
        params: parameters, or groups of them. All ranks have the same.
        lr: the learning rate.
        betas: how much of the averages of gradients and of their squares stays at each step.
        eps: what is added to the denominator.
        weight_decay: parameters shrink by ``lr * weight_decay`` at each step.
        shampoo_beta: how much of the preconditioners stays at each step; None: the second of betas.
        precondition_frequency: updates from one eigenbasis to the next, each by one power iteration
            and a QR.
        max_precond_dim: a side with more rows or columns has no preconditioner.
        algorithm: "soap" or "adamw".
        split: a parameter holds several matrices, concatenated in ``split_dim``, as in fused
            projections: how many equal ones, or the size of each.
        split_dim: the dim in which the matrices are concatenated: 0, its rows, or 1.

    Raises:
        ValueError: if an option is out of its range, or a parameter of a SOAP group has one dim.
    """

    algorithm = "soap"

    def __init__(  # the names of the authors' program, then ours
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        *,
        algorithm: str = "soap",
        split: Split = None,
        split_dim: int = 0,
    ) -> None:
        self._scheduled: list[Scheduled] = []
        self._owned: Owned = {}
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "shampoo_beta": shampoo_beta,
                "eps": eps,
                "weight_decay": weight_decay,
                "precondition_frequency": precondition_frequency,
                "max_precond_dim": max_precond_dim,
                "algorithm": algorithm,
                "split": split,
                "split_dim": split_dim,
            },
        )

    @property
    def owned_bytes(self) -> int:
        """How many bytes this rank keeps for the matrices that it owns."""
        return sum(part.nbytes for state in self._owned.values() for part in state.values())

    # -- the state in the memory of owners --------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has; a collective call, as ``state_dict()``."""
        return {**super().__getstate__(), "state": self._whole_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state over, which the next step brings to owners."""
        super().__setstate__(state)
        self._scheduled, self._owned = [], {}

    def state_dict(self) -> dict[str, Any]:
        """Return all state, that of owners laid over the ranks: every rank calls it.

        Averages are cut as their parameter. Preconditioners and their bases are concatenated row by
        row, matrix after matrix, in evenly cut tensors of one dim.
        """
        own = self.state
        self.state = self._whole_state()
        try:
            return super().state_dict()
        finally:
            self.state = own

    def _loaded(
        self, group: Mapping[str, Any], param: torch.Tensor, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        if group["algorithm"] == "adamw":
            return super()._loaded(group, param, state)
        return loaded(group, param, state)

    def _whole_state(self) -> defaultdict[torch.Tensor, Any]:
        laid = self._laid_out()
        return defaultdict(
            dict, {param: {**own, **laid.get(param, {})} for param, own in self.state.items()}
        )

    def _laid_out(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return what owners keep, laid over the ranks, by parameter."""
        params = self._params()
        laid: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for batch in self._schedule.batches if self._schedule is not None else ():
            tensors = self._tensors_of(batch)
            found = []
            for each in tensors:
                scheduled = self._scheduled[each.param]
                param = params[scheduled.place]
                found.append(scheduled.zeros(each.name, local_of(param).device))
                laid.setdefault(param, {})[each.name] = found[-1]
            Laying(batch, tensors).to_holders(self._owned, [local_of(each) for each in found])
        return laid

    def _tensors_of(self, batch: Batch) -> list[Laid]:
        """Return all tensors of the states of the parameters of ``batch``."""
        numbers = dict.fromkeys(each.param for each in batch.matrices)
        return [
            self._scheduled[at].laid(at, name)
            for at in numbers
            for name in self._scheduled[at].kept
        ]

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _prepare(self, matrices: Sequence[Stepped]) -> Schedule:
        """Return the schedule of these, and sees to it that owners have their state."""
        jobs, places = list(map(self._job_of, matrices)), [each.place for each in matrices]
        schedule = self._schedule
        known = [each.place for each in self._scheduled]
        if schedule is None or known != places or not schedule.is_of(jobs):
            schedule = Schedule(jobs, torch.float32)
            for param, laid in self._laid_out().items():
                self.state[param].update(laid)
            self._scheduled, self._owned = list(map(Scheduled.of, matrices)), {}
            self._schedule = schedule
        for batch in schedule.batches:
            self._bring(batch, matrices)
        for each, scheduled in zip(matrices, self._scheduled, strict=True):
            each.state.setdefault("step", torch.tensor(-1.0)).add_(1)
            if not all(each.state.get(name, _REAL).is_meta for name in scheduled.kept):
                each.state.update(scheduled.placeholders())
        return schedule

    def _bring(self, batch: Batch, matrices: Sequence[Stepped]) -> None:
        """Bring to owners what is laid over the ranks; what was never stepped begins there."""
        there = [
            each
            for each in self._tensors_of(batch)
            if not matrices[each.param].state.get(each.name, _NONE).is_meta
        ]
        parts = [local_of(matrices[each.param].state[each.name]) for each in there]
        for key, found in Laying(batch, there).to_owners(parts).items():
            self._owned[key] = {name: as_matrix(part) for name, part in found.items()}
        for matrix in (batch.matrices[at] for at in batch.owned):
            each = matrices[matrix.param]
            if not each.state:
                rows, columns = matrix_shape(matrix.box.size)
                device = batch.ranks.device or each.data.device
                most = each.options["max_precond_dim"]
                self._owned[matrix.param, matrix.number] = new_state(rows, columns, most, device)

    # -- one step ---------------------------------------------------------------------------------

    def _require_options(self, group: Mapping[str, Any]) -> None:
        beta = group["shampoo_beta"]
        if beta is not None and not 0 <= beta < 1:
            raise ValueError(
                f"shampoo_beta is {beta!r}; pass None, or a number of at least 0 below 1"
            )
        require_count(group, "precondition_frequency", _MOST)
        require_count(group, "max_precond_dim", _MOST)

    def _shapes_of_matrix(self, group: Mapping[str, Any], param: torch.Tensor) -> Shapes:
        return shapes_of(group, param)

    def _require_matrix_fits(self, each: Stepped) -> None:
        require_fits(each, at_owners=any(each.place == known.place for known in self._scheduled))

    def _described_matrix(self, each: Stepped) -> str:
        state = [value for name, value in each.state.items() if name != "step"]
        there = "with owners" if any(value.is_meta for value in state) else "laid out"
        return f"{super()._described_matrix(each)}, its state {there if state else 'new'}"

    def _job_of(self, each: Stepped) -> Job:
        options, limits = each.options, ("max_precond_dim", "precondition_frequency")
        most, frequency = (options[name] for name in limits)
        return Job(
            each.spec,
            tuple(each.param.shape),
            options["split"],
            options["split_dim"],
            f"with sides up to {most} preconditioned, by a new basis every {frequency} updates",
            partial(flops_of, most=most, frequency=frequency),
            label_of(each.param),
        )

    def _step_matrices(
        self, matrices: Sequence[Stepped], rest: Sequence[Sequence[Stepped]]
    ) -> None:
        schedule = self._prepare(matrices)
        schedule.run(_SOAPWork(matrices, rest, self._owned))


class _SOAPWork(MatrixWork):
    """SOAP's rule for matrices."""

    def __init__(
        self,
        matrices: Sequence[Stepped],
        rest: Sequence[Sequence[Stepped]],
        owned: Owned,
    ) -> None:
        super().__init__(matrices, rest)
        self._owned = owned

    def give(self, at: int) -> torch.Tensor:
        """Return the gradient."""
        return self._matrices[at].gradient.to(torch.float32)

    def compute(self, at: int, number: int, matrix: torch.Tensor) -> torch.Tensor:
        """Return by what a matrix is to change, after moving its state; at first, by nothing."""
        each, state = self._matrices[at], self._owned[at, number]
        step = int(each.state["step"])
        if step == 0:
            start(state, matrix, each.options)
            return torch.zeros_like(matrix)
        return update_of(state, matrix, each.options, step)

    def add(self, each: Stepped, data: torch.Tensor, arrived: Sequence[Arrived]) -> None:
        """Subtract the update from a parameter, and shrink it."""
        if int(each.state["step"]) == 0:
            return
        lr = float(each.options["lr"])
        for part in arrived:
            part.of(data).add_(part.values.to(data.device), alpha=-lr)
        data.mul_(1 - lr * each.options["weight_decay"])
