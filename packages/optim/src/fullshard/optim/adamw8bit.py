"""AdamW with 8-bit states, in blocks of the whole parameter and not of a shard.

Owns the optimizer: which parameters keep what state, one step, and how a state is loaded. Codes,
blocks and rounding are ``quantised``'s affair.

[Note: blocks that are cut] ``Shard(1)`` and tensor parallelism cut through rows, so a block may be
split over two ranks. The largest magnitudes of all parts go through one MAX all-reduce per step,
for all parameters of a mesh together. Then every rank has the scales of whole rows, and keeps them
as a plain tensor. Where rows are whole, scales are a ``DTensor`` placed as the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from fullshard.checkpoint.spi import Box, box_here
from fullshard.comm import EventKind, check_collective
from fullshard.optim.base.loading import Shapes
from fullshard.optim.base.optimizer import ShardedOptimizer
from fullshard.optim.base.options import (
    require_betas,
    require_not_negative,
    require_one_of,
    require_real,
)
from fullshard.optim.base.stepped import Stepped
from fullshard.optim.owners.ranks import ranks_of
from fullshard.optim.owners.reshard import recut
from fullshard.optim.quantised.averages import Averages, batches_of
from fullshard.optim.quantised.kept import (
    MOMENTS,
    cuts_rows,
    is_cut,
    is_quantised,
    scale_name,
    scale_shape,
)
from fullshard.optim.quantised.rounding import places_in, rounded_to_bf16
from fullshard.sharding.spi import local_shard, make_dtensor, make_spec, spec_of, untraced

__all__ = ["AdamW8bit"]

_ROUNDINGS = ("stochastic", "residual", "nearest")


class AdamW8bit(ShardedOptimizer):
    """AdamW whose two averages are codes of 8 bits: 2.03 bytes per element where AdamW keeps 8.

    T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861): blocks of
    256 elements of a row of the whole parameter, each by its own largest magnitude, with a dynamic
    map. Parameters of one dim, with rows under 64 or fewer than 4096 elements keep fp32 averages,
    by their whole shape. Therefore shards keep the state of the unsharded model: on a CPU bit for
    bit, given equal gradients.

    Args:
        params: parameters, or groups of them. All ranks have the same.
        lr: the learning rate.
        betas: how much of both averages stays at each step.
        eps: what is added to the denominator.
        weight_decay: parameters shrink by ``lr * weight_decay`` at each step.
        rounding: how parameters in bf16 are rounded after a step, which is made in fp32:
            "stochastic", by random bits equal on every mesh; "residual", to the nearest,
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

    def _require_fits(self, each: Stepped) -> None:
        if each.state:
            _require_state(each)

    def _loaded(
        self, group: Mapping[str, Any], param: torch.Tensor, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the state in the dtypes in which it was kept; scales may be of another mesh."""
        return {name: _placed_as(param, name, value) for name, value in state.items()}

    def _change(self, found: Sequence[Sequence[Stepped]]) -> None:
        stepped = [each for group in found for each in group]
        for each in stepped:
            if not each.state:
                _start(each)
        waiting: list[Averages] = []
        for batch in (batch for group in found for batch in batches_of(group)):
            averages = Averages(batch)
            _step(batch, averages)
            averages.write_scales()
            if averages.are_cut:
                waiting.append(averages)
            else:
                averages.write_codes()
        _take_largest([each for each in stepped if is_cut(each)])
        for averages in waiting:
            averages.write_codes()


# -- the state of a parameter ---------------------------------------------------------------------


def _shapes_of(group: Mapping[str, Any], param: torch.Tensor) -> Shapes:
    """Return the keys of a parameter's state, and the shape of what is there; None: a number."""
    shapes: dict[str, Sequence[int] | None] = {"step": None}
    for name in MOMENTS:
        shapes[name] = param.shape
        if is_quantised(param.shape):
            shapes[scale_name(name)] = scale_shape(param.shape)
    if _keeps_residual(group, param):
        shapes["residual"] = param.shape
    return shapes


def _keeps_residual(group: Mapping[str, Any], param: torch.Tensor) -> bool:
    return group["rounding"] == "residual" and param.dtype.itemsize < 4


def _start(each: Stepped) -> None:
    """Give a parameter its first state."""
    shape = each.param.shape
    each.state["step"] = torch.zeros((), dtype=torch.float32)
    for name in MOMENTS:
        dtype = torch.uint8 if is_quantised(shape) else torch.float32
        each.state[name] = each.like(dtype)
        if is_quantised(shape):
            whole = torch.zeros(scale_shape(shape), dtype=torch.float32, device="meta")
            each.state[scale_name(name)] = _placed(each, whole)
    if _keeps_residual(each.options, each.param):
        each.state["residual"] = each.like()


def _require_state(each: Stepped) -> None:
    """Raise ``RuntimeError`` unless the state is cut as the parameter."""
    for name, wanted in _shapes_of(each.options, each.param).items():
        if wanted is not None:
            each.part(name, wanted, plain=name.endswith("_scale") and is_cut(each))


def _placed(each: Stepped, whole: torch.Tensor) -> torch.Tensor:
    """Return zeros for the scales of a parameter; ``whole``: as the unsharded model has them."""
    if each.spec is None or is_cut(each):
        return torch.zeros_like(whole, device=each.data.device)
    spec = make_spec(each.spec.mesh, tuple(each.spec.placements), whole)
    shape = (*each.data.shape[:-1], whole.shape[-1])
    return make_dtensor(torch.zeros(shape, dtype=whole.dtype, device=each.data.device), spec)


def _placed_as(param: torch.Tensor, name: str, value: Any) -> Any:
    """Return a part of a state as ``param`` keeps it: scales may be cut otherwise."""
    if not isinstance(value, torch.Tensor) or name == "step":
        return value
    if name.endswith("_scale"):
        value = _scales_for(param, value)
    if isinstance(value, DTensor):
        return make_dtensor(local_shard(value).to(local_shard(param).device), spec_of(value))
    return value.to(param.device)


def _scales_for(param: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor) or cuts_rows(param.placements, param.ndim):
        return recut(scales, None)
    return recut(scales, make_spec(param.device_mesh, tuple(param.placements), scales))


# -- one step -------------------------------------------------------------------------------------


@untraced
def _take_largest(cut: Sequence[Stepped]) -> None:
    """Make the scales of parameters whose rows are cut the largest that any rank has.

    Call one all-reduce per mesh, in the order of parameters, which is equal on all ranks.
    """
    by_mesh: dict[DeviceMesh, list[torch.Tensor]] = {}
    for each in cut:
        assert each.spec is not None, "it is cut"
        tables = by_mesh.setdefault(each.spec.mesh, [])
        tables += [each.state[scale_name(name)] for name in MOMENTS]
    for mesh, tables in by_mesh.items():
        ranks = ranks_of(mesh)
        if ranks.process_group is None:
            continue
        flat = torch.cat([table.reshape(-1) for table in tables]).to(ranks.device)
        what = "scales of an optimizer's blocks"
        check_collective(EventKind.ALL_REDUCE, what, ranks.process_group, nbytes=flat.nbytes)
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=ranks.process_group)
        parts = flat.split([table.numel() for table in tables])
        for table, part in zip(tables, parts, strict=True):
            table.copy_(part.view(table.shape))


def _step(batch: Sequence[Stepped], averages: Averages) -> None:
    """Step a batch by AdamW (Loshchilov and Hutter, 2019), as torch does, in fp32."""
    options = batch[0].options
    data = [_wide(each) for each in batch]
    dtype = data[0].dtype
    wide = {name: [value.to(dtype) for value in averages.values[name]] for name in MOMENTS}
    beta1, beta2 = options["betas"]
    adamw(
        data,
        [each.gradient.to(dtype) for each in batch],
        wide["exp_avg"],
        wide["exp_avg_sq"],
        [],
        [each.state["step"] for each in batch],
        foreach=None if torch.compiler.is_compiling() else True,  # no compiler traces it on CPU
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(options["lr"]),
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )
    for name in MOMENTS:
        for value, stepped in zip(averages.values[name], wide[name], strict=True):
            if value is not stepped:
                value.copy_(stepped)
    for each, stepped in zip(batch, data, strict=True):
        _write(each, stepped)


def _wide(each: Stepped) -> torch.Tensor:
    """Return what a step is added to, with what the last one cut off."""
    data = each.wide()
    return data.add_(each.part("residual")) if "residual" in each.state else data


def _write(each: Stepped, data: torch.Tensor) -> None:
    """Write the result of a step to the parameter, rounded if the parameter has 16 bits."""
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
