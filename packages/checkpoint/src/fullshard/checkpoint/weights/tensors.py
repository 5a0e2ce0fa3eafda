"""The tensors of a model that files hold: parameters and persistent buffers, by their clean names.

Owns finding them, with ties, the shard that this rank has of each, memory for those on the meta
device, and telling the engine before and after their values change. See [Note: clean names] in
``fullshard.checkpoint.names``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.boxes import Box, box_of
from fullshard.checkpoint.files.headers import WeightsError
from fullshard.checkpoint.names import clean_name
from fullshard.sharding import FSDPParamGroup
from fullshard.sharding.spi import (
    group_of,
    in_block,
    local_of,
    make_dtensor,
    make_spec,
    owner_of,
    require_between_steps,
    sharded_of,
)

__all__ = [
    "ModelTensor",
    "groups_of",
    "materialise",
    "require_no_block",
    "tensors_of",
    "unset_buffers",
]


@dataclass
class ModelTensor:
    """A parameter or buffer, under all the names that it has.

    Attributes:
        names: those of the unwrapped model, the first one first.
        places: every module that holds it, and as what.
        tensor: as the optimizer holds it: sharded parameters are ``DTensor``.
    """

    names: list[str]
    places: list[tuple[nn.Module, str]]
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.tensor.shape)

    @property
    def sharded(self) -> bool:
        """Whether ranks share it."""
        return isinstance(self.tensor, DTensor)

    @property
    def coordinates(self) -> Sequence[int]:
        """Where in its mesh this rank is; none for a plain tensor."""
        tensor = self.tensor
        return (tensor.device_mesh.get_coordinate() or ()) if isinstance(tensor, DTensor) else ()

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, outside autograd; all of a plain tensor."""
        return local_of(self.tensor).detach()

    @property
    def shard_bytes(self) -> int:
        """About how large a shard is: the same on all ranks of its mesh."""
        tensor = self.tensor
        if not isinstance(tensor, DTensor):
            return tensor.nbytes
        ways = [
            tensor.device_mesh.size(axis)
            for axis, placement in enumerate(tensor.placements)
            if not placement.is_replicate()
        ]
        return math.prod(tensor.shape) * tensor.dtype.itemsize // math.prod(ways)

    @cached_property
    def box(self) -> Box:
        """Which part of the whole tensor that is."""
        return box_of(self.tensor)

    def check(self) -> None:
        """Return if the shard is what mesh and placements say, and can be filled in parts.

        Raises:
            WeightsError: if not.
        """
        local, tensor = self.local, self.tensor
        if isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor.placements):
            raise WeightsError(
                f"{self.name} is a DTensor with placements {tensor.placements}, a sum that is not "
                "added up yet; redistribute it first"
            )
        if type(local) not in (torch.Tensor, nn.Parameter) or local.layout != torch.strided:
            raise WeightsError(
                f"{self.name} is stored as a {type(local).__name__} in {local.layout}; files hold "
                "plain tensors: load and save before weights are quantised or made sparse"
            )
        if tuple(local.shape) != self.box.size:
            raise WeightsError(
                f"this rank's shard of {self.name} has shape {tuple(local.shape)}, but its mesh "
                f"and placements give it {self.box.size} of {self.shape}; make the DTensor with "
                "distribute_tensor or fully_shard"
            )


def tensors_of(model: nn.Module) -> list[ModelTensor]:
    """Return the parameters and persistent buffers of ``model``, each once, as in a state dict."""
    found: dict[torch.Tensor, ModelTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        buffers = {
            key: value
            for key, value in module._buffers.items()
            if key not in module._non_persistent_buffers_set
        }
        for key, value in [*module._parameters.items(), *buffers.items()]:
            if value is None:
                continue
            held = sharded_of(value)
            tensor = found.setdefault(held, ModelTensor([], [], held))
            tensor.names.append(clean_name(start + key))
            tensor.places.append((module, key))
    return list(found.values())


def unset_buffers(model: nn.Module) -> list[str]:
    """Return the names of buffers on the meta device."""
    return [clean_name(name) for name, buffer in model.named_buffers() if buffer.is_meta]


def groups_of(tensors: Iterable[ModelTensor], call: str) -> list[FSDPParamGroup]:
    """Return the parameter groups of ``tensors``, resharded.

    Raises:
        RuntimeError: if one is in the middle of its forward or backward, saying so of ``call``.
    """
    found = {id(group): group for each in tensors if (group := group_of(each.tensor)) is not None}
    for group in found.values():
        require_between_steps(group, call)
    for group in found.values():
        group.reshard()
        group.adopt_registered()
    return list(found.values())


def require_no_block(tensors: Iterable[ModelTensor], call: str) -> None:
    """Return if none of ``tensors`` is in an ``unsharded()`` block; all ranks see the same.

    Raises:
        RuntimeError: if one is, saying so of ``call``.
    """
    for each in tensors:
        group = group_of(each.tensor)
        if group is not None and in_block(group):
            raise RuntimeError(
                f"{call} was called inside an unsharded() block that holds {each.name}; call it "
                "outside of the block"
            )


def materialise(
    tensors: Sequence[ModelTensor], dtype: torch.dtype | None, device: torch.device | None
) -> None:
    """Allocate memory, with arbitrary content, for the ``tensors`` on the meta device.

    Args:
        tensors: of the model.
        dtype: that of floating ones; None: their own.
        device: where; None: where the group of a sharded one stores it, else on the device of its
            mesh, or the CPU.
    """
    for each in tensors:
        if not each.local.is_meta:
            continue
        wanted = dtype if dtype is not None and each.tensor.is_floating_point() else None
        empty = torch.empty_like(
            each.local, device=device or _home(each.tensor), dtype=wanted or each.tensor.dtype
        )
        _replace(each, empty)


def _home(tensor: torch.Tensor) -> torch.device | str:
    group = group_of(tensor)
    if group is not None:
        return group.policies.offload.home(group.device)
    return tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"


def _replace(each: ModelTensor, local: torch.Tensor) -> None:
    """Make ``local`` the shard, in a new tensor in all places of the one on the meta device."""
    old, new = each.tensor, local
    if isinstance(old, DTensor):
        like = torch.empty(old.shape, dtype=local.dtype, device="meta")
        new = make_dtensor(local, make_spec(old.device_mesh, tuple(old.placements), like))
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        for key, value in vars(old).items():
            new.__dict__.setdefault(key, value)
    for module, key in each.places:
        if isinstance(new, nn.Parameter):
            module._parameters[key] = new
        else:
            module._buffers[key] = new
    group = group_of(old)
    each.tensor = new
    if group is not None:
        group.adopt_registered()
        owner = owner_of(new)
        assert owner is not None and owner.sharded is new, "it was taken over"
