"""SOAP on sharded parameters: Adam in the eigenbasis of Shampoo, on the rank that owns a matrix.

Owns the optimizer: groups and their options, where its state is, and what becomes of the owner's
result. The rule for one matrix is ``preconditioned``'s affair.

[Note: owned state] Averages and preconditioners of a matrix live on its owner alone. In ``state``
there are tensors without memory in their place, on the meta device, since programs read there which
keys exist. ``state_dict()`` lays the values over the ranks: averages as the parameter is cut,
preconditioners evenly. Loading puts such tensors into ``state``, and the next step brings them to
the owners that there are then. When other parameters have gradients than in the step before, owners
may change: all is laid over the ranks, and brought to the new ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from fullshard.optim.adamw import start_adamw, step_adamw
from fullshard.optim.base.loading import require_own_state
from fullshard.optim.base.options import (
    require_betas,
    require_count,
    require_not_negative,
    require_one_of,
)
from fullshard.optim.base.stepped import Stepped, label_of, stepped_in
from fullshard.optim.owned_state import (
    Scheduled,
    as_matrix,
    loaded,
    local_of,
    require_fits,
    shapes_of,
)
from fullshard.optim.owners.exchange import Arrived, Batch
from fullshard.optim.owners.laying import Laid, Laying, Owned
from fullshard.optim.owners.matrices import Split, matrix_shape, require_matrices
from fullshard.optim.owners.schedule import Job, Schedule
from fullshard.optim.preconditioned import flops_of, new_state, start, update_of

__all__ = ["SOAP"]

_ALGORITHMS = ("soap", "adamw")
_MOST = 10**9
_NONE = torch.empty(0, device="meta")  # of what was never stepped
_REAL = torch.empty(0)


class SOAP(Optimizer):
    """Adam in the eigenbasis of Shampoo's preconditioners: the same on every mesh as on the whole.

    N. Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv 2409.11321),
    algorithm 3. As in the authors' program, the first step only fills the preconditioners and
    changes no matrix, and decay comes after the update. Gradients travel to the matrix's owner in
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
        split: a parameter holds several matrices along ``split_dim``, as fused projections do: how
            many equal ones, or the size of each.
        split_dim: the dim of a matrix along which they lie: 0, its rows, or 1.

    Raises:
        ValueError: if an option is out of its range, or a parameter of a SOAP group has one dim.
    """

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
        self._schedule: Schedule | None = None
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters; options that it lacks are the optimizer's.

        Raises:
            ValueError: if an option is out of its range, or a parameter does not fit it.
        """
        super().add_param_group(param_group)
        try:
            _require_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @property
    def owned_bytes(self) -> int:
        """How many bytes this rank keeps for the matrices that it owns."""
        return sum(part.nbytes for state in self._owned.values() for part in state.values())

    # -- the state, which lies with owners --------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy or a pickle has; a collective call, as ``state_dict()``."""
        return {**super().__getstate__(), "state": self._whole_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes a state over, which the next step brings to owners."""
        super().__setstate__(state)
        self._schedule, self._scheduled, self._owned = None, [], {}

    def state_dict(self) -> dict[str, Any]:
        """Returns all state, that of owners laid over the ranks: every rank calls it.

        Averages are cut as their parameter. Preconditioners and their bases lie row by row, matrix
        after matrix, in tensors of one dim, which are cut evenly.
        """
        own = self.state
        self.state = self._whole_state()
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` gave, in fp32, as it was kept.

        Preconditioners may be whole, or those of another mesh: every rank calls it.

        Raises:
            ValueError: if it is of another optimizer, or averages are cut otherwise than their
                parameter. Nothing is changed then.
        """
        require_own_state(self, state_dict, shapes_of)
        super().load_state_dict(state_dict)  # casts it to the parameters' dtypes
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                state = state_dict["state"].get(key)
                if state and group["algorithm"] == "soap":
                    self.state[param] = loaded(group, param, state)

    def _whole_state(self) -> defaultdict[torch.Tensor, Any]:
        laid = self._laid_out()
        return defaultdict(
            dict, {param: {**own, **laid.get(param, {})} for param, own in self.state.items()}
        )

    def _laid_out(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns what owners keep, laid over the ranks, by parameter."""
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
        """Returns all tensors of the states of the parameters of ``batch``."""
        numbers = dict.fromkeys(each.param for each in batch.matrices)
        return [
            self._scheduled[at].laid(at, name)
            for at in numbers
            for name in self._scheduled[at].kept
        ]

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _prepare(self, matrices: Sequence[Stepped], places: Sequence[int]) -> Schedule:
        """Returns the schedule of these, and sees to it that owners have their state.

        Args:
            matrices: the parameters.
            places: of each among all of the optimizer.
        """
        jobs = [_job_of(each) for each in matrices]
        schedule = self._schedule
        known = [each.place for each in self._scheduled]
        if schedule is None or known != places or not schedule.is_of(jobs):
            schedule = Schedule(jobs, torch.float32)
            for param, laid in self._laid_out().items():
                self.state[param].update(laid)
            self._scheduled, self._owned = list(map(Scheduled.of, matrices, places)), {}
            self._schedule = schedule
        for batch in schedule.batches:
            self._bring(batch, matrices)
        for each, scheduled in zip(matrices, self._scheduled, strict=True):
            each.state.setdefault("step", torch.tensor(-1.0)).add_(1)
            if not all(each.state.get(name, _REAL).is_meta for name in scheduled.kept):
                each.state.update(scheduled.placeholders())
        return schedule

    def _bring(self, batch: Batch, matrices: Sequence[Stepped]) -> None:
        """Brings to owners what is laid over the ranks; what was never stepped begins there."""
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient; every rank of their meshes calls it.

        Args:
            closure: computes the loss anew, and its gradients.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: before anything is sent or changed, if a gradient or a state is cut
                otherwise than its parameter, or a state is of other options.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found: dict[str, list[list[Stepped]]] = {name: [] for name in _ALGORITHMS}
        for group in self.param_groups:
            found[group["algorithm"]].append(stepped_in(self, group))
        matrices = [each for stepped in found["soap"] for each in stepped]
        numbers = {id(param): number for number, param in enumerate(self._params())}
        places = [numbers[id(each.param)] for each in matrices]
        owned = {each.place for each in self._scheduled}
        for each, place in zip(matrices, places, strict=True):
            require_fits(each, at_owners=place in owned)
        rest = [stepped for stepped in found["adamw"] if stepped]
        for each in (each for stepped in rest for each in stepped):
            start_adamw(each)
        self._prepare(matrices, places).run(_SOAPWork(matrices, rest, self._owned))
        return loss


# -- one step -------------------------------------------------------------------------------------


def _job_of(each: Stepped) -> Job:
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


class _SOAPWork:
    """What SOAP does with matrices, and with the rest."""

    def __init__(
        self, matrices: Sequence[Stepped], rest: Sequence[Sequence[Stepped]], owned: Owned
    ) -> None:
        self._matrices = matrices
        self._rest = rest
        self._owned = owned

    def give(self, at: int) -> torch.Tensor:
        """Returns the gradient."""
        return self._matrices[at].gradient.to(torch.float32)

    def compute(self, at: int, number: int, matrix: torch.Tensor) -> torch.Tensor:
        """Returns by what a matrix is to change, after moving its state; at first, by nothing."""
        each, state = self._matrices[at], self._owned[at, number]
        step = int(each.state["step"])
        if step == 0:
            start(state, matrix, each.options)
            return torch.zeros_like(matrix)
        return update_of(state, matrix, each.options, step)

    def take(self, at: int, arrived: Sequence[Arrived]) -> None:
        """Subtracts the update from a parameter, and shrinks it.

        What is narrower than fp32 is added up in fp32 and rounded once.
        """
        each = self._matrices[at]
        if int(each.state["step"]) == 0:
            return
        lr = float(each.options["lr"])
        narrow = each.data.dtype.itemsize < 4
        data = each.data.float() if narrow else each.data
        for part in arrived:
            part.of(data).add_(part.values.to(data.device), alpha=-lr)
        data.mul_(1 - lr * each.options["weight_decay"])
        if narrow:
            each.data.copy_(data)

    def meanwhile(self) -> None:
        """Steps the rest by AdamW."""
        for stepped in self._rest:
            step_adamw(stepped)


def _require_group(group: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` unless all options and parameters of ``group`` are allowed."""
    require_one_of(group, "algorithm", _ALGORITHMS)
    require_not_negative(group, "lr", "eps", "weight_decay")
    require_betas(group)
    if group["algorithm"] == "adamw":
        return
    beta = group["shampoo_beta"]
    if beta is not None and not 0 <= beta < 1:
        raise ValueError(f"shampoo_beta is {beta!r}; pass None, or a number of at least 0 below 1")
    require_count(group, "precondition_frequency", _MOST)
    require_count(group, "max_precond_dim", _MOST)
    require_one_of(group, "split_dim", (0, 1))
    require_matrices(group, "SOAP")
