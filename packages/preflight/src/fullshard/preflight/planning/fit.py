"""``fit``: the choice that trains fastest within a budget of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.preflight.costs.devices import Device, device_named
from fullshard.preflight.costs.here import Here
from fullshard.preflight.planning.choices import Choice, blocks_of, split_batch
from fullshard.preflight.planning.memory.ledger import Category
from fullshard.preflight.planning.plan import plan
from fullshard.preflight.planning.report import Plan
from fullshard.preflight.planning.world import MeshLike
from fullshard.preflight.training import Loss, adamw
from fullshard.preflight.wording import parse_bytes, size_text
from fullshard.sharding import ShardingPlacements

__all__ = ["CHOICES", "BudgetError", "Fit", "fit"]

CHOICES: tuple[Choice, ...] = tuple(
    Choice(recompute=recompute, **options)
    for recompute in (False, True)
    for options in (
        {"placements": ShardingPlacements.zero(1)},
        {"placements": ShardingPlacements.zero(2)},
        {"reshard": False},
        {},
    )
)
"""What ``fit`` tries: ZeRO-1, ZeRO-2, ZeRO-3 with parameters kept until backward, ZeRO-3; each with
activations that are kept or computed again. From the one with least to do to the one with least
memory."""


class BudgetError(ValueError):
    """No choice fits."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A choice that fits, and its plan.

    Attributes:
        choice: ``choice.shard(units, model, mesh)`` shards as planned; ``choice.options`` are the
            keyword arguments of ``fully_shard``.
        plan: what it needs.
        tried: all that was planned, in the order in which it was.
    """

    choice: Choice
    plan: Plan
    tried: tuple[tuple[Choice, Plan], ...]


def fit(
    build_model: Callable[[], nn.Module],
    batch: Any,
    loss: Loss,
    *,
    mesh: MeshLike,
    budget: int | str | None = None,
    device: str | Device | Here | None = None,
    choices: Sequence[Choice] = CHOICES,
    units: Callable[[nn.Module], Iterable[nn.Module]] = blocks_of,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
) -> Fit:
    """Return the choice that fits the budget and takes the least time.

    A device without a description gives no times, so the first choice that fits is returned:
    give those with least to do first.

    Args:
        build_model: as for ``plan``.
        batch: one rank's batch of a step, or a function that returns it; a choice's micro-batches
            divide it in dim 0.
        loss: as for ``plan``.
        mesh: as for ``plan``.
        budget: bytes of a device, or a text such as ``"80GiB"``; None: what the device has.
        device: as for ``plan``.
        choices: what to try.
        units: the modules to shard, in the order in which they run; each module of each outermost
            ``nn.ModuleList`` by default.
        optimizer: as for ``plan``.

    Raises:
        BudgetError: if nothing fits; the message has the missing bytes, and whether the shards
            alone are too large.
        ValueError: if there is neither a budget nor a device that has one, or there are no choices;
            and as ``plan``.
    """
    if budget is None:
        if device in (None, "cpu", "here") or isinstance(device, Here):
            raise ValueError(
                f"fit got no budget=, and device={device!r} does not say how many bytes it has; "
                "pass budget=, or a device that is described"
            )
        budget = int(device_named(device).memory)
    if isinstance(budget, str):
        budget = parse_bytes(budget)
    if not choices:
        raise ValueError("fit got no choices; leave choices= out, or pass some Choice(...)")
    tried: list[tuple[Choice, Plan]] = []
    for choice in choices:
        given = batch() if callable(batch) else batch
        found = plan(
            build_model,
            split_batch(given, choice.micro_batches),
            loss,
            mesh=mesh,
            shard=partial(choice.shard, units),
            optimizer=optimizer,
            micro_batches=choice.micro_batches,
            device=device,
        )
        tried.append((choice, found))
        if found.step_time is None and found.fits(budget):
            break
        _check_shards(found, budget, choices)
    fitting = [each for each in tried if each[1].fits(budget)]
    if not fitting:
        least = min(tried, key=lambda each: each[1].peak)
        raise BudgetError(
            f"none of {len(tried)} choices fits {size_text(budget)} on a mesh of {least[1].name}; "
            f"the least is {size_text(least[1].peak)}, with {least[0]}. Take more ranks that "
            "shard, fewer rows in a batch, or choices= with micro-batches"
        )
    choice, found = min(fitting, key=lambda each: each[1].step_time or 0.0)
    return Fit(choice=choice, plan=found, tried=tuple(tried))


def _check_shards(found: Plan, budget: int, choices: Sequence[Choice]) -> None:
    """Raise if what every choice has to keep is beyond the budget."""
    kept = found.categories[Category.SHARDS] + found.categories[Category.OPTIMIZER_STATE]
    if kept > budget and not any(each.offload for each in choices):
        raise BudgetError(
            f"shards and optimizer state alone are {size_text(kept)} on each of {found.name} "
            f"ranks, more than the budget of {size_text(budget)}; take more ranks that shard"
        )
