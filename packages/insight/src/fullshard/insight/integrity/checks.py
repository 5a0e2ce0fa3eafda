"""Checks of a training run for damaged numbers, every n-th step.

Owns when what is checked: collectives and gradients (from ``begin`` to ``before_update``), shards
and optimizer state between steps, replicas, a gradient that is computed twice, losses and norms out
of range. The main classes are ``IntegrityPolicy`` and ``IntegrityChecks``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.comm import AllGather, ReduceScatter, observe
from fullshard.comm.spi import rank_major
from fullshard.insight.integrity.checksums import checksums
from fullshard.insight.integrity.collectives import (
    CheckedAllGather,
    CheckedReduceScatter,
    Parts,
    exchanged,
)
from fullshard.insight.integrity.findings import Finding, Findings
from fullshard.insight.integrity.gradients import ReducedGradients
from fullshard.insight.integrity.starting import StartingState
from fullshard.sharding import FSDPModule, FSDPParamGroup, HSDPMeshInfo
from fullshard.sharding.spi import groups_of, local_of, owner_of, sharded_of

__all__ = ["IntegrityChecks", "IntegrityPolicy"]

_REMEMBERED = 50  # losses and norms


@dataclass(frozen=True, kw_only=True)
class IntegrityPolicy:
    """The kinds of checks, and how often they run.

    Attributes:
        every: every n-th step is checked; 1: each.
        collectives: compare what each rank sent with what each rank received.
        at_rest: compare shards and optimizer state from the end of a step to the next one, and
            gradients from their reduction to ``before_update``.
        replicas: compare shards and optimizer state with those of other replicas (HSDP), of each
            parameter over the replicas of its own mesh.
        largest_growth: a loss or norm that is this many times the median of the last 50, or not
            finite, stops the run before the optimizer steps; in each step. ``inf``: only one that
            is not finite.

    Raises:
        ValueError: if ``every`` is less than 1, or ``largest_growth`` not more than 1.
    """

    every: int = 100
    collectives: bool = True
    at_rest: bool = True
    replicas: bool = True
    largest_growth: float = math.inf

    def __post_init__(self) -> None:
        """Check the values."""
        if self.every < 1:
            raise ValueError(f"every is {self.every!r}; pass 1 or more steps")
        if not self.largest_growth > 1:
            raise ValueError(
                f"largest_growth is {self.largest_growth!r}; pass a factor above 1, or math.inf"
            )


@dataclass(frozen=True, kw_only=True)
class _AtRest:
    """This rank's part of a parameter, or of its optimizer state: see ``stage``."""

    stage: str
    name: str
    param: torch.Tensor
    tensor: torch.Tensor


class IntegrityChecks:
    """Checks one model and its optimizer; its methods are called on all ranks alike.

    The order of a step: ``begin()``, forward and backward, ``before_update(...)``, the optimizer's
    step, ``end()``. A step that is due replaces the collectives of the model by synchronous ones
    with checks, and adds gradients in rank order.

    Args:
        model: sharded, with gradients that travel in the reduce dtype.
        optimizer: of its parameters.
        policy: what is checked.
        process_group: the ranks that raise together; None: all.

    Raises:
        ValueError: if the model has no sharded module.

    Attributes:
        comparisons: how many comparisons were made on this rank.
        all_gather: the class that replaces the all-gathers of a step that is due.
        reduce_scatter: the class that replaces the reduce-scatters of a step that is due.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        policy: IntegrityPolicy,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._policy = policy
        self._findings = Findings(process_group)
        self._sharded = [each for each in model.modules() if isinstance(each, FSDPModule)]
        if not self._sharded:
            raise ValueError(
                f"got a {type(model).__name__} without sharded modules; call fully_shard() first"
            )
        self._step = 0
        self._resting: torch.Tensor | None = None
        self._seen: dict[str, deque[float]] = {}
        self._replaced: list[tuple[FSDPParamGroup, AllGather, ReduceScatter | None]] = []
        self._reduced: ReducedGradients | None = None  # in a step that is due
        self._observing = ExitStack()
        # Made once: subclasses of a test may damage what they move.
        self.all_gather: type[CheckedAllGather] = CheckedAllGather
        self.reduce_scatter: type[CheckedReduceScatter] = CheckedReduceScatter

    @property
    def comparisons(self) -> int:
        """How many comparisons were made on this rank."""
        return self._findings.comparisons

    @property
    def is_due(self) -> bool:
        """Whether the present step is checked."""
        return self._is_due(self._step)

    def _is_due(self, step: int) -> bool:
        return step % self._policy.every == 0

    # -- a step ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step: compare what rested, and replace collectives if the step is due."""
        self._step += 1
        resting, self._resting = self._resting, None
        if resting is not None:
            self._compare_resting(resting)
        self._put_back()  # if a step ended in an error, without before_update()
        if self._policy.collectives and self.is_due:
            for group in self._groups():
                self._replace(group)
        if self._policy.at_rest and self.is_due:
            self._reduced = ReducedGradients(self._groups(), self._findings)
            self._observing.enter_context(observe(self._reduced))

    def before_update(
        self, *, loss: torch.Tensor | float | None = None, norm: torch.Tensor | float | None = None
    ) -> None:
        """End the checks of forward and backward; call it before the optimizer steps.

        A program that clips or unscales gradients calls it before that, too: gradients are only
        compared until the program changes them.

        Args:
            loss: of this step; compared with earlier ones.
            norm: of the gradients; compared with earlier ones.

        Raises:
            DamagedNumbersError: on all ranks, if any rank found something in this step.
        """
        due = self.is_due
        self._findings.reduced = []
        if self._reduced is not None:
            self._reduced.compare()
        self._put_back()
        for name, value in (("loss", loss), ("norm", norm)):
            if value is not None:
                self._compare_range(name, float(value))
        if due or loss is not None or norm is not None:
            self._findings.raise_together(self._step)

    def end(self) -> None:
        """End the step, after the optimizer's: compare replicas, and note what rests if due.

        Raises:
            DamagedNumbersError: on all ranks, if replicas differ.
        """
        if self._policy.replicas and self.is_due:
            self._compare_replicas()
            self._findings.raise_together(self._step)  # also on ranks whose stage has no replicas
        if self._policy.at_rest and self._is_due(self._step + 1):
            self._resting = checksums([each.tensor for each in self._at_rest()])

    def twice(self, compute: Callable[[], object]) -> None:
        """Run ``compute``, which makes gradients, twice; compare what this rank computed.

        The gradients are compared to the bit before they are reduced, so the rank that computed
        other bits is named. The runs begin with equal buffers, gradients and random numbers (of
        torch and of Python). The results of the second run stay: they are what one run leaves. In a
        step that ``is_due``, between ``begin`` and ``before_update``, which raises what is found.

        Args:
            compute: forward and backward of the same inputs, such as
                ``lambda: model(batch).mean().backward()``; with gradient accumulation, of all
                micro-batches of the step.

        Raises:
            RuntimeError: if the step is not due, or if gradients wait for a later reduction before
                or after ``compute``.
        """
        if not (self.is_due and self._policy.collectives):
            raise RuntimeError(
                f"twice() was called in step {self._step}, whose collectives are not checked; call "
                "it where is_due is true, with IntegrityPolicy(collectives=True)"
            )
        self._require_reduced("before compute ran; let compute run all micro-batches of the step")
        if self._reduced is not None:
            self._reduced.compare()  # the computation adds to what is there
        start = StartingState(self._model, self._params())
        devices = {each.device.index for each in self._groups() if each.device.type != "cpu"}
        try:
            with torch.random.fork_rng(devices=sorted(devices)):
                first = self._reduced_by(compute)
            self._require_reduced("after compute ran; let its last backward reduce")
        finally:
            start.restore()
        second = self._reduced_by(compute)
        if [name for name, _ in first] != [name for name, _ in second]:
            self._found("gradient", "the model", "a second computation reduced other tensors")
            return
        for (name, one), (_, other) in zip(first, second, strict=True):
            self._findings.comparisons += 1
            if not torch.equal(one, other):
                self._found("gradient", name, "a second computation gave other bits")

    def _require_reduced(self, when: str) -> None:
        """Raise, on all ranks, if gradients of earlier backwards wait for a reduction."""
        for group in self._groups():
            gradients = group.gradients
            if gradients.in_unsynced_backward or gradients.setups.strategy.unsynced:
                raise RuntimeError(
                    f"twice() found gradients of {group.name or 'the root'} that are not reduced, "
                    f"{when}: a computation that is repeated would add to them twice"
                )

    def _params(self) -> list[torch.Tensor]:
        """Return the parameters of the model and of the optimizer, each once."""
        held = [param for group in self._optimizer.param_groups for param in group["params"]]
        return list(dict.fromkeys(map(sharded_of, [*self._model.parameters(), *held])))

    def _reduced_by(self, compute: Callable[[], object]) -> list[tuple[str, torch.Tensor]]:
        self._findings.reduced = []
        compute()
        return self._findings.reduced

    # -- parts of it -------------------------------------------------------------------------------

    def _groups(self) -> list[FSDPParamGroup]:
        return [group for module in self._sharded for group in groups_of(module)]

    def _replace(self, group: FSDPParamGroup) -> None:
        """Let checked collectives move what a group gathers and reduces."""
        ranks = group.mesh_info.shard_world_size

        def gathered() -> Parts:
            names = [param.name for param in group.params]
            return Parts(names, rank_major(tuple([param.sent for param in group.params]), ranks))

        def reduced() -> Parts:
            names = [param.name for param in group.params]
            specs = tuple([param.grad_spec for param in group.params])
            return Parts(names, rank_major(specs, ranks, len(names)))

        self._replaced.append(
            (group, group.gathering.config.comm, group.gradients.setups.settings.comm)
        )
        name = group.name or "the root"
        group.gathering.set_comm(self.all_gather(name, gathered, self._findings))
        group.gradients.setups.change(comm=self.reduce_scatter(name, reduced, self._findings))

    def _put_back(self) -> None:
        """Let each group gather and reduce as it did before ``begin``."""
        self._reduced = None
        self._observing.close()
        replaced, self._replaced = self._replaced, []
        for group, all_gather, reduce_scatter in replaced:
            group.gathering.set_comm(all_gather)
            group.gradients.setups.change(comm=reduce_scatter)

    def _at_rest(self) -> Iterator[_AtRest]:
        """Yield this rank's part of all that a step changes."""
        for name, registered in self._model.named_parameters():
            param = sharded_of(registered)  # a forward may have left full parameters
            tensor = local_of(param).detach()
            yield _AtRest(stage="shard", name=name, param=param, tensor=tensor)
            for value in self._optimizer.state.get(param, {}).values():
                if isinstance(value, torch.Tensor):
                    tensor = local_of(value)
                    yield _AtRest(stage="optimizer state", name=name, param=param, tensor=tensor)

    def _compare_resting(self, before: torch.Tensor) -> None:
        resting = list(self._at_rest())
        now = checksums([each.tensor for each in resting])
        self._findings.comparisons += len(resting)
        for index in (before != now).any(1).nonzero().flatten().tolist():
            each = resting[index]
            self._found(each.stage, each.name, "it changed after the optimizer stepped")

    def _compare_replicas(self) -> None:
        """Compare each parameter with its other replicas, which its own mesh names."""
        by_replicas: dict[dist.ProcessGroup, list[_AtRest]] = {}
        for each in self._at_rest():
            owner = owner_of(each.param)
            if owner is not None and isinstance(owner.mesh_info, HSDPMeshInfo):
                replicas = owner.mesh_info.replicate_process_group
                by_replicas.setdefault(replicas, []).append(each)
        for replicas, resting in by_replicas.items():
            self._compare_with(replicas, resting)

    def _compare_with(self, replicas: dist.ProcessGroup, resting: list[_AtRest]) -> None:
        """Compare with the other ranks of a group; the ranks of the rarest bits are named."""
        own = checksums([each.tensor for each in resting])
        everyone = exchanged(own, replicas)
        self._findings.comparisons += len(resting)
        for index, each in enumerate(resting):
            found = [tuple(sums[index].tolist()) for sums in everyone]
            if len(set(found)) == 1:
                continue
            rarest = min(map(found.count, found))
            ranks = [rank for rank, sums in enumerate(found) if found.count(sums) == rarest]
            self._findings.add(
                Finding(
                    stage="replicas",
                    ranks=tuple([dist.get_global_rank(replicas, rank) for rank in ranks]),
                    tensor=each.name,
                    what=f"the {each.stage} differs from other replicas",
                )
            )

    def _compare_range(self, name: str, value: float) -> None:
        seen = self._seen.setdefault(name, deque(maxlen=_REMEMBERED))
        self._findings.comparisons += 1
        if not math.isfinite(value):
            self._found("range", f"the {name}", f"it is {value}")
        elif len(seen) >= 5 and abs(value) > self._policy.largest_growth * abs(median(seen)):
            self._found(
                "range",
                f"the {name}",
                f"it is {value}, more than {self._policy.largest_growth} times the median "
                f"{median(seen)} of the last {len(seen)} steps",
            )
        else:
            seen.append(value)

    def _found(self, stage: str, tensor: str, what: str) -> None:
        finding = Finding(stage=stage, ranks=(dist.get_rank(),), tensor=tensor, what=what)
        self._findings.add(finding)
