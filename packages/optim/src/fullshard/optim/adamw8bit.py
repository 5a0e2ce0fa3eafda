"""AdamW with states of 8 bits, whose blocks lie in the whole parameter and not in a shard.

Owns the optimizer: which parameters keep what state, one step, and how a state is loaded. Codes,
blocks and rounding are ``quantised``'s affair.

[Note: blocks that are cut] Where a cut runs through rows, as ``Shard(1)`` and tensor parallelism
cut, a block may lie on two ranks. What is largest in each part goes through one MAX all-reduce per
step, for all parameters of a mesh together. Then every rank has the scales of whole rows, and keeps
them as a plain tensor. Where rows are whole, scales are a ``DTensor`` placed as the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from fullshard.checkpoint.boxes import Box, box_here
from fullshard.comm import EventKind, check_collective
from fullshard.optim.base.loading import Shapes
from fullshard.optim.base.optimizer import ShardedOptimizer
from fullshard.optim.base.options import (
    require_betas,
    require_not_negative,
    require_one_of,
    require_real,
)
from fullshard.optim.base.stepped import Stepped, label_of
from fullshard.optim.owners.ranks import ranks_of
from fullshard.optim.owners.recut import recut
from fullshard.optim.quantised.blocks import Blocks, count_in
from fullshard.optim.quantised.rounding import places_in, rounded_to_bf16
from fullshard.sharding.base.compat import local_shard, make_dtensor, make_spec, spec_of

__all__ = ["AdamW8bit"]

_ROUNDINGS = ("stochastic", "residual", "nearest")
_LEAST_ROW, _LEAST = 64, 4096
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The averages, and whether they are signed."""


class AdamW8bit(ShardedOptimizer):
    """AdamW whose two averages are codes of 8 bits: 2.03 bytes per element where AdamW keeps 8.

    T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861): blocks of
    256 elements of a row of the whole parameter, each by its own largest magnitude, with a dynamic
    map. Parameters of one dim, with rows under 64 or fewer than 4096 elements keep fp32 averages,
    by their whole shape. So shards keep what the unsharded model would: on a CPU bit for bit, given
    equal gradients.

    Args:
        params: parameters, or groups of them. All ranks have the same.
        lr: the learning rate.
        betas: how much of both averages stays at each step.
        eps: what is added to the denominator.
        weight_decay: parameters shrink by ``lr * weight_decay`` at each step.
        rounding: how parameters in bf16 are rounded after a step, which is made in fp32:
            "stochastic", by random bits that are the same on any mesh; "residual", to the nearest,
            with what was cut off kept in bf16 for the next step; "nearest".
        seed: of the random bits.

    Raises:
        ValueError: if an option is out of its range.
    """

    def __init__(  # torch's arguments, then ours
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rounding: str = "stochastic",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "rounding": rounding, "seed": seed})

    def _require_group(self, group: Mapping[str, Any]) -> None:
        require_not_negative(group, "lr", "eps", "weight_decay", "seed")
        require_betas(group)
        require_one_of(group, "rounding", _ROUNDINGS)
        require_real(group, "AdamW8bit")

    def _shapes_of(self, group: Mapping[str, Any], param: torch.Tensor) -> Shapes:
        return _shapes_of(group, param)

    def _is_exchanged(self, group: Mapping[str, Any], param: torch.Tensor) -> bool:
        """Tells whether blocks are cut; see [Note: blocks that are cut]."""
        is_cut = isinstance(param, DTensor) and _cuts_rows(param.placements, param.ndim)
        return is_cut and _is_quantised(param.shape)

    def _described(self, each: Stepped) -> str:
        assert each.spec is not None, "it is exchanged"
        placed = tuple(each.spec.placements)
        return f"{label_of(each.param)} of shape {tuple(each.param.shape)} placed as {placed}"

    def _require_fits(self, each: Stepped) -> None:
        if each.state:
            _require_state(each)

    def _loaded(
        self, group: Mapping[str, Any], param: torch.Tensor, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the state in the dtypes in which it was kept; scales may be of another mesh."""
        return {name: _placed_as(param, name, value) for name, value in state.items()}

    def _change(self, found: Sequence[Sequence[Stepped]]) -> None:
        cut: list[_Averages] = []
        for each in (each for stepped in found for each in stepped):
            if not each.state:
                _start(each)
            averages = _Averages.of(each)
            _step(each, averages.values)
            if averages.blocks is not None and _is_cut(each):
                cut.append(averages)
            else:
                averages.write(each)
        _write_cut(cut)


# -- the state of a parameter ---------------------------------------------------------------------


def _is_quantised(shape: Sequence[int]) -> bool:
    """Tells by the whole shape whether averages have 8 bits."""
    return len(shape) > 1 and shape[-1] >= _LEAST_ROW and Box.whole(shape).numel >= _LEAST


def _shapes_of(group: Mapping[str, Any], param: torch.Tensor) -> Shapes:
    """Returns the keys of a parameter's state, and the shape of what is there; None: a number."""
    shapes: dict[str, Sequence[int] | None] = {"step": None}
    for name in _MOMENTS:
        shapes[name] = param.shape
        if _is_quantised(param.shape):
            shapes[f"{name}_scale"] = _scale_shape(param.shape)
    if _keeps_residual(group, param):
        shapes["residual"] = param.shape
    return shapes


def _scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-1], count_in(shape[-1]))


def _keeps_residual(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    return group["rounding"] == "residual" and param.dtype.itemsize < 4


def _is_cut(each: Stepped) -> bool:
    """Tells whether rows are cut; see [Note: blocks that are cut]."""
    return each.spec is not None and _cuts_rows(each.spec.placements, each.param.ndim)


def _cuts_rows(placements: Sequence[Any], ndim: int) -> bool:
    return any(not at.is_replicate() and at.dim == ndim - 1 for at in placements)


def _start(each: Stepped) -> None:
    """Gives a parameter its first state."""
    shape = each.param.shape
    each.state["step"] = torch.zeros((), dtype=torch.float32)
    for name in _MOMENTS:
        dtype = torch.uint8 if _is_quantised(shape) else torch.float32
        each.state[name] = each.like(dtype)
        if _is_quantised(shape):
            whole = torch.zeros(_scale_shape(shape), dtype=torch.float32, device="meta")
            each.state[f"{name}_scale"] = _placed(each, whole)
    if _keeps_residual(each.options, each.param):
        each.state["residual"] = each.like()


def _require_state(each: Stepped) -> None:
    """Raises ``RuntimeError`` unless the state is cut as the parameter."""
    for name, wanted in _shapes_of(each.options, each.param).items():
        if wanted is not None:
            each.part(name, wanted, plain=name.endswith("_scale") and _is_cut(each))


def _placed(each: Stepped, whole: torch.Tensor) -> torch.Tensor:
    """Returns zeros for the scales of a parameter; ``whole``: as the unsharded model has them."""
    if each.spec is None or _is_cut(each):
        return torch.zeros_like(whole, device=each.data.device)
    spec = make_spec(each.spec.mesh, tuple(each.spec.placements), whole)
    shape = (*each.data.shape[:-1], whole.shape[-1])
    return make_dtensor(torch.zeros(shape, dtype=whole.dtype, device=each.data.device), spec)


def _placed_as(param: torch.Tensor, name: str, value: Any) -> Any:
    """Returns a part of a state as ``param`` keeps it: scales may be cut otherwise."""
    if not isinstance(value, torch.Tensor) or name == "step":
        return value
    if name.endswith("_scale"):
        value = _scales_for(param, value)
    if isinstance(value, DTensor):
        return make_dtensor(local_shard(value).to(local_shard(param).device), spec_of(value))
    return value.to(param.device)


def _scales_for(param: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor) or _cuts_rows(param.placements, param.ndim):
        return recut(scales, None)
    return recut(scales, make_spec(param.device_mesh, tuple(param.placements), scales))


# -- one step -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Averages:
    """Both averages of a parameter in fp32 while it is stepped.

    Attributes:
        each: the parameter.
        values: by name: the state itself if it is fp32.
        held: what this rank has of the parameter.
        blocks: where its blocks lie; None: it is not quantised.
    """

    each: Stepped
    values: dict[str, torch.Tensor]
    held: Box
    blocks: Blocks | None

    @classmethod
    def of(cls, each: Stepped) -> _Averages:
        """Reads the state."""
        held = Box.whole(each.param.shape) if each.spec is None else box_here(each.spec)
        if not _is_quantised(each.param.shape):
            return cls(each, {name: each.part(name) for name in _MOMENTS}, held, None)
        blocks = Blocks(held)
        values = {}
        for name, signed in _MOMENTS.items():
            scales = _scales_here(each, name, held, blocks)
            values[name] = blocks.dequantised(each.part(name), scales, signed=signed)
        return cls(each, values, held, blocks)

    def write(self, each: Stepped) -> None:
        """Writes the state."""
        if self.blocks is None:
            return
        for name, signed in _MOMENTS.items():
            scales = _scales_here(each, name, self.held, self.blocks)
            scales.copy_(self.blocks.scales_of(self.values[name]))
            self.write_codes(name, scales, signed=signed)

    def write_codes(self, name: str, scales: torch.Tensor, *, signed: bool) -> None:
        """Writes the codes by ``scales``."""
        assert self.blocks is not None, "it is quantised"
        codes = self.blocks.quantised(self.values[name], scales, signed=signed)
        self.each.part(name).copy_(codes)


def _scales_here(each: Stepped, name: str, held: Box, blocks: Blocks) -> torch.Tensor:
    """Returns the scales of this rank's blocks: a view of the state."""
    scales: torch.Tensor = each.state[f"{name}_scale"]
    if each.spec is None:
        return scales
    if not _is_cut(each):
        return local_shard(scales)
    return held.along(-1, blocks.first, blocks.shape[-1]).of(scales)


def _write_cut(cut: Sequence[_Averages]) -> None:
    """Writes states whose blocks are cut, after one all-reduce per mesh."""
    by_mesh: dict[DeviceMesh, list[_Averages]] = {}
    for averages in cut:
        assert averages.each.spec is not None, "it is cut"
        by_mesh.setdefault(averages.each.spec.mesh, []).append(averages)
    for mesh, members in by_mesh.items():
        tables = []
        for averages in members:
            assert averages.blocks is not None, "it is quantised"
            for name in _MOMENTS:
                table = averages.each.state[f"{name}_scale"]
                tables.append(table.zero_())
                here = _scales_here(averages.each, name, averages.held, averages.blocks)
                here.copy_(averages.blocks.scales_of(averages.values[name]))
        _take_largest(tables, mesh)
        for averages in members:
            assert averages.blocks is not None, "it is quantised"
            for name, signed in _MOMENTS.items():
                here = _scales_here(averages.each, name, averages.held, averages.blocks)
                averages.write_codes(name, here, signed=signed)


def _take_largest(tables: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Makes each element of ``tables`` the largest that any rank of ``mesh`` has."""
    ranks = ranks_of(mesh)
    if ranks.process_group is None:
        return
    flat = torch.cat([table.reshape(-1) for table in tables]).to(ranks.device)
    what = "scales of an optimizer's blocks"
    check_collective(EventKind.ALL_REDUCE, what, ranks.process_group, nbytes=flat.nbytes)
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=ranks.process_group)
    for table, part in zip(tables, flat.split([table.numel() for table in tables]), strict=True):
        table.copy_(part.view(table.shape))


def _step(each: Stepped, averages: Mapping[str, torch.Tensor]) -> None:
    """Steps one parameter by AdamW (Loshchilov and Hutter, 2019), as torch does, in fp32."""
    options, data = each.options, each.wide()
    if "residual" in each.state:
        data = data.add_(each.part("residual"))
    wide = {name: value.to(data.dtype) for name, value in averages.items()}
    beta1, beta2 = options["betas"]
    adamw(
        [data],
        [each.gradient.to(data.dtype)],
        [wide["exp_avg"]],
        [wide["exp_avg_sq"]],
        [],
        [each.state["step"]],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(options["lr"]),
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )
    for name, value in averages.items():
        if value is not wide[name]:
            value.copy_(wide[name])
    _write(each, data)


def _write(each: Stepped, data: torch.Tensor) -> None:
    """Writes what was stepped to the parameter, rounded if that has 16 bits."""
    if "residual" in each.state:
        each.data.copy_(data)
        each.part("residual").copy_(data - each.data)
        return
    if each.options["rounding"] == "stochastic" and each.data.dtype is torch.bfloat16:
        held = Box.whole(each.param.shape) if each.spec is None else box_here(each.spec)
        places = places_in(each.param.shape, held, data.device)
        step = int(each.state["step"])
        data = rounded_to_bf16(data, places, each.options["seed"], each.place, step)
    each.write(data)
