"""How SOAP's state is laid out: what owners hold, what a state dict holds, and what a step accepts.

Owns shapes and cuts of the tensors of a parameter's state, and their checks; see [Note: owned
state] in ``soap``. Refuses to know when anything travels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from fullshard.checkpoint.spi import box_here
from fullshard.optim.base.loading import Shapes
from fullshard.optim.base.stepped import Stepped, described, label_of
from fullshard.optim.owners.owner_layout import Laid
from fullshard.optim.owners.reshard import recut
from fullshard.optim.preconditioned import AVERAGES, Kept, kept_of
from fullshard.sharding.spi import ShardingSpec, local_of, make_dtensor, make_spec, spec_of

__all__ = ["Scheduled", "as_matrix", "loaded", "require_fits", "shapes_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Scheduled:
    """A parameter of the schedule.

    Attributes:
        place: the parameter's among all of the optimizer. The parameter itself may be a copy, made
            for one step, where offload moves steps elsewhere.
        spec: how it is cut; None: a plain tensor.
        kept: the tensors of its state.
    """

    place: int
    spec: ShardingSpec | None
    kept: Mapping[str, Kept]

    @classmethod
    def of(cls, each: Stepped) -> Scheduled:
        """Take what a step found."""
        return cls(each.place, each.spec, _kept(each.options, each.param))

    def laid(self, at: int, name: str) -> Laid:
        """Return how a tensor of the state is laid out; ``at``: the parameter's number."""
        kept = self.kept[name]
        return Laid(at, name, kept.shape, _spec_of(self.spec, name, kept), kept.boxes)

    def placeholders(self) -> dict[str, torch.Tensor]:
        """Return tensors without memory for all of the state; see [Note: owned state]."""
        return {name: self.zeros(name, torch.device("meta")) for name in self.kept}

    def zeros(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a tensor of the state, of zeros, as it is laid out."""
        kept = self.kept[name]
        spec = _spec_of(self.spec, name, kept)
        shape = kept.shape if spec is None else box_here(spec).size
        part = torch.zeros(shape, dtype=torch.float32, device=device)
        return part if spec is None else make_dtensor(part, spec)


def _kept(group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Kept]:
    split = group["split"]
    split = tuple(split) if isinstance(split, list) else split
    return kept_of(tuple(param.shape), split, group["split_dim"], group["max_precond_dim"])


def shapes_of(group: Mapping[str, Any], param: torch.Tensor) -> Shapes:
    """Return the keys of a parameter's state, and the whole shapes; None: a number."""
    return {"step": None, **{name: kept.shape for name, kept in _kept(group, param).items()}}


def _spec_of(spec: ShardingSpec | None, name: str, kept: Kept) -> ShardingSpec | None:
    """Return how a tensor of the state is cut; ``spec``: of the parameter."""
    if spec is None:
        return None
    placements = tuple(spec.placements)
    if name not in AVERAGES:
        placements = tuple([each if each.is_replicate() else Shard(0) for each in placements])
    whole = torch.empty(kept.shape, dtype=torch.float32, device="meta")
    return make_spec(spec.mesh, placements, whole)


def as_matrix(part: torch.Tensor) -> torch.Tensor:
    """Return a part of a state as the matrix that it is; what has one dim is square."""
    return part if part.ndim == 2 else part.view(math.isqrt(part.numel()), -1)


def loaded(
    group: Mapping[str, Any], param: torch.Tensor, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of a parameter as the next step takes it."""
    own = spec_of(param) if isinstance(param, DTensor) else None
    found = {"step": torch.as_tensor(state["step"], dtype=torch.float32).clone()}
    for name, kept in _kept(group, param).items():
        value = recut(state[name], _spec_of(own, name, kept))
        part = local_of(value).to(local_of(param).device, torch.float32)
        spec = _spec_of(own, name, kept)
        found[name] = part if spec is None else make_dtensor(part, spec)
    return found


def require_fits(each: Stepped, *, at_owners: bool) -> None:
    """Raise ``RuntimeError`` unless a parameter has no state yet, or that of its options."""
    if not each.state:
        return
    kept = _kept(each.options, each.param)
    shapes = {name: value.shape for name, value in each.state.items() if name != "step"}
    if shapes != {name: torch.Size(at.shape) for name, at in kept.items()}:
        raise RuntimeError(
            f"the state of {label_of(each.param)} has {_said(shapes)}, and its options ask for "
            f"{_said({name: at.shape for name, at in kept.items()})}; split, split_dim and "
            "max_precond_dim cannot change while there is state"
        )
    for name in kept:
        value = each.state[name]
        spec = _spec_of(each.spec, name, kept[name])
        cut = (spec.placements, spec.mesh) if spec else None
        found = (value.placements, value.device_mesh) if isinstance(value, DTensor) else None
        if found != cut or (value.is_meta and not at_owners):
            raise RuntimeError(
                f"{label_of(each.param)} is {described(each.param)}, but its state {name!r} is "
                f"{described(value)}; build the optimizer after fully_shard, take its state from "
                "state_dict() and load it with load_state_dict, which cuts it as the parameter is "
                "cut now"
            )


def _said(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
