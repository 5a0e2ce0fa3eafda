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

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

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
    where a tensor is placed otherwise than cut along one axis of its mesh.
    """
    found = {name: None if t is None else t.detach() for name, t in tensors.items()}
    axes: dict[str, int] = {}
    for name, tensor in found.items():
        axis = _cut_axis(tensor)
        if axis is not None:
            axes[name] = axis
    whole = {name: None if t is None else full(t) for name, t in found.items() if name not in axes}
    cut: dict[tuple[DeviceMesh, int], dict[str, DTensor]] = {}  # in one order on all ranks
    for name, axis in axes.items():
        tensor = found[name]
        assert isinstance(tensor, DTensor)
        cut.setdefault((tensor.device_mesh, axis), {})[name] = tensor
    for (mesh, axis), some in cut.items():
        whole.update(_joined(some, axis, mesh.get_group(axis)))
    return {name: whole[name] for name in tensors}


def _cut_axis(tensor: torch.Tensor | None) -> int | None:
    """The only axis of its mesh that cuts this tensor; None where there is none, or no other."""
    if not isinstance(tensor, DTensor) or type(tensor.to_local()) is not torch.Tensor:
        return None
    cuts = [axis for axis, placed in enumerate(tensor.placements) if not placed.is_replicate()]
    return cuts[0] if len(cuts) == 1 and type(tensor.placements[cuts[0]]) is Shard else None


def _joined(tensors: Mapping[str, DTensor], axis: int, group: Any) -> dict[str, torch.Tensor]:
    """The whole tensors of ranks that each have a part, in two collectives: lengths, then bytes."""
    local = [tensor.to_local().contiguous() for tensor in tensors.values()]
    dims = [_dim(tensor, axis) for tensor in tensors.values()]
    lengths = torch.tensor([part.shape[dim] for part, dim in zip(local, dims, strict=True)])
    table = _gathered(lengths.to(local[0].device), group)
    shapes = [
        [(*t.shape[:dim], length, *t.shape[dim + 1 :]) for t, dim, length in columns]
        for columns in (zip(tensors.values(), dims, row.tolist(), strict=True) for row in table)
    ]
    sizes = [
        [math.prod(shape) * part.element_size() for shape, part in zip(row, local, strict=True)]
        for row in shapes
    ]
    packed = local[0].new_zeros(max(sum(row) for row in sizes), dtype=torch.uint8)
    mine = torch.cat([part.flatten().view(torch.uint8) for part in local])
    packed[: len(mine)] = mine
    parts: list[list[torch.Tensor]] = [[] for _ in local]
    for buffer, row, bytes_of in zip(_gathered(packed, group), shapes, sizes, strict=True):
        pieces = buffer[: sum(bytes_of)].split(bytes_of)
        for place, (piece, shape) in enumerate(zip(pieces, row, strict=True)):
            # A copy begins where its dtype may.
            parts[place].append(piece.clone().view(local[place].dtype).view(shape))
    joined = [torch.cat(some, dim=dim) for some, dim in zip(parts, dims, strict=True)]
    for (name, tensor), whole in zip(tensors.items(), joined, strict=True):
        assert whole.shape == tensor.shape, name
    return dict(zip(tensors, joined, strict=True))


def _dim(tensor: DTensor, axis: int) -> int:
    """The dim that this axis of the mesh cuts."""
    placement = tensor.placements[axis]
    assert isinstance(placement, Shard)
    return placement.dim % tensor.ndim


def _gathered(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """The tensor of each rank of a group; all have one shape."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The mean of a number over all ranks: of the ranks' losses, the loss of the whole batch."""
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value.detach())
    return torch.stack(gathered).mean()


def assert_equal(got: Tensors, want: Tensors, tolerance: Tolerance, what: str) -> None:
    """Compare on the CPU; raise AssertionError with each name that differs, and by how much."""
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
        value, expected = value.cpu(), expected.cpu()
        allowed = tolerance.of(expected)
        if allowed == 0 and torch.equal(value, expected):
            continue
        finite = expected.isfinite()
        if not finite.all():  # a model that has diverged does so on both sides, in equal places
            if not torch.equal(finite, value.isfinite()):
                wrong.append(f"{name}: {int((~finite).sum())} elements are to be inf or nan")
            continue
        error = (value - expected).abs().max().item() if value.numel() else 0.0
        if not error <= allowed or allowed == 0:
            largest = expected.abs().max().item()
            wrong.append(f"{name}: off by {error:.3g} of {largest:.3g}, allowed {allowed:.3g}")
    assert not wrong, f"{what}:\n" + "\n".join(wrong)
