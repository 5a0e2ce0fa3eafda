"""When two runs are equal: what is read from a model, and how far apart rounding may bring it.

Owns the tolerances of the parity tests and where they come from. [Note: tolerance] Sharding changes
one thing in the arithmetic: a sum over the rows of the batch becomes ``world`` sums over the rows
of a rank, added by the reduction, and the mean is taken in two steps. Every value compared is such
a sum, passed on through the few layers of a small model. Each rounding errs by at most ``eps / 2``
of what is rounded, so a value is at most ``(DEPTH + world) * eps`` of the largest value of its
tensor away, with DEPTH the roundings on the way that the reordering can touch. In float64 that is
about 1e-14: no wrong scale, missed term or lost cast hides in it. Where nothing is reordered, the
tolerance is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

__all__ = [
    "EXACT",
    "Tensors",
    "Tolerance",
    "assert_equal",
    "full",
    "gradients_of",
    "mean_over_ranks",
    "parameters_of",
    "rounding",
]

DEPTH = 32

Tensors = Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How many ``eps`` of its dtype, relative to its tensor's largest value, a value may be off.

    Attributes:
        units: the number of ``eps``.
        floor: what a tensor's largest value counts as at least, for tensors that are near zero
            because large terms cancel.
        overrides: the dtype whose ``eps`` counts where it is not the tensor's own.
    """

    units: float
    floor: float = 0.1
    overrides: torch.dtype | None = field(default=None)

    def of(self, tensor: torch.Tensor) -> float:
        """The tolerance for ``tensor``, absolute."""
        if self.units == 0 or not tensor.is_floating_point() or tensor.numel() == 0:
            return 0.0
        largest = max(self.floor, tensor.abs().max().item())
        return self.units * torch.finfo(self.overrides or tensor.dtype).eps * largest


EXACT = Tolerance(units=0)


def rounding(world_size: int, *, steps: int = 1, dtype: torch.dtype | None = None) -> Tolerance:
    """The tolerance of [Note: tolerance], for values that went through ``steps`` optimizer steps.

    The optimizers of these tests have a Lipschitz constant of about 1 (AdamW with ``lr == eps``),
    so each step adds one step's error and passes on what was there.
    """
    return Tolerance(units=(DEPTH + world_size) * steps, overrides=dtype)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, a copy outside autograd. On a DTensor every rank must call it."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.clone()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The whole gradient of every parameter, by name."""
    return _whole({name: parameter.grad for name, parameter in model.named_parameters()})


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The whole of every parameter, by name."""
    return _whole(dict(model.named_parameters()))


def _whole(tensors: Tensors) -> dict[str, torch.Tensor | None]:
    """The whole of each tensor: the ranks' parts, exchanged all at once, one behind the other.

    ``full_tensor()`` says the same, at several times the cost: a collective for each. It serves
    where a tensor is placed otherwise than cut along one axis.
    """
    found = {name: None if t is None else t.detach() for name, t in tensors.items()}
    sharded = {
        name: t
        for name, t in found.items()
        if isinstance(t, DTensor) and len(t.placements) == 1 and t.placements[0].is_shard()
    }
    whole = {
        name: None if t is None else full(t) for name, t in found.items() if name not in sharded
    }
    for mesh in dict.fromkeys(t.device_mesh for t in sharded.values()):  # in one order on all ranks
        mine = {name: t.to_local() for name, t in sharded.items() if t.device_mesh == mesh}
        everyone: list[Any] = [None] * mesh.size()
        dist.all_gather_object(everyone, mine, group=mesh.get_group())
        for name in mine:
            (placement,) = sharded[name].placements
            assert isinstance(placement, Shard), f"{name} is placed as {placement}"
            joined = torch.cat([parts[name] for parts in everyone], dim=placement.dim)
            assert joined.shape == sharded[name].shape, name
            whole[name] = joined
    return {name: whole[name] for name in tensors}


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The mean of a number over all ranks: of the ranks' losses, the loss of the whole batch."""
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value.detach())
    return torch.stack(gathered).mean()


def assert_equal(got: Tensors, want: Tensors, tolerance: Tolerance, what: str) -> None:
    """Raises AssertionError, with every name that differs and by how much."""
    assert got.keys() == want.keys(), f"{what}: {sorted(got)} != {sorted(want)}"
    wrong = []
    for name, expected in want.items():
        value = got[name]
        if value is None or expected is None:
            if value is not expected:
                wrong.append(f"{name}: got {value}, expected {expected}")
            continue
        if value.dtype != expected.dtype or value.shape != expected.shape:
            wrong.append(
                f"{name}: got {value.dtype} {tuple(value.shape)}, "
                f"expected {expected.dtype} {tuple(expected.shape)}"
            )
            continue
        allowed = tolerance.of(expected)
        if allowed == 0 and torch.equal(value, expected):
            continue
        error = (value - expected).abs().max().item() if value.numel() else 0.0
        if not error <= allowed or allowed == 0:
            largest = expected.abs().max().item()
            wrong.append(f"{name}: off by {error:.3g} of {largest:.3g}, allowed {allowed:.3g}")
    assert not wrong, f"{what}:\n" + "\n".join(wrong)
