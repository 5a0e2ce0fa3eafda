"""One parameter of a group: shard, unsharded tensor, gradient, and the modules that hold it.

Owns the swap between the sharded and the unsharded parameter in every module that shares it, and
the unsharded gradient until it is reduced. It starts no collective and allocates no unsharded
memory: the group does both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import TensorSpec
from fullshard.sharding.compat import ShardingSpec, local_shard, make_dtensor, make_spec, spec_of
from fullshard.sharding.mesh import FSDPMeshInfo
from fullshard.sharding.protocols import ParameterDTypes, Staging

__all__ = ["FSDPParam", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """A module that holds the parameter, and the name under which it does."""

    module: nn.Module
    name: str


class FSDPParam:
    """A sharded parameter.

    Attributes:
        name: full name from the root, for messages; set anew when a root is found.
        places: every module and name that holds this parameter; tied weights have several.
        sharded: the parameter the optimizer sees: a ``DTensor`` with ``Shard(dim)``.
        gather_spec: full shape, shard dim and dtype in which it is gathered.
        reduce_dtype: dtype in which its gradient is reduced.
    """

    def __init__(
        self,
        param: nn.Parameter,
        places: list[Place],
        mesh_info: FSDPMeshInfo,
        dim: int,
        staging: Staging,
        name: str,
    ) -> None:
        """Cuts ``param`` and keeps this rank's shard; the modules keep ``param`` until told."""
        self.name = name
        self.places = places
        self.mesh_info = mesh_info
        self.staging = staging
        self.dim = dim
        self.shape = torch.Size(param.shape)
        self.spec: ShardingSpec = make_spec(mesh_info.mesh, mesh_info.placements(dim), param)
        self._stored_dtype = param.dtype
        self.sharded = self._cut(param)
        self.gather_spec = TensorSpec(shape=tuple(param.shape), dtype=param.dtype, dim=dim)
        self.reduce_dtype = param.dtype
        self.unsharded: nn.Parameter = self.sharded  # until the group makes its storage
        self._requires_grad = param.requires_grad  # what both were given last
        self._attributes = self.sharded.__dict__  # swap_tensors, in .to(), takes it away
        self._accumulated: torch.Tensor | None = None

    def _cut(self, param: nn.Parameter) -> nn.Parameter:
        local = self.shard_of(param.detach())
        sharded = nn.Parameter(
            make_dtensor(self.staging.store(local), self.spec), requires_grad=param.requires_grad
        )
        sharded.__dict__.update(param.__dict__)  # attributes that the user put on the parameter
        return sharded

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a full tensor of the parameter's shape: a contiguous copy."""
        return self.mesh_info.shard_of(full, self.dim)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, as a plain tensor."""
        return local_shard(self.sharded)

    @property
    def requires_grad(self) -> bool:
        """Whether the sharded parameter requires a gradient now."""
        return self.sharded.requires_grad

    def resolve_dtypes(self, dtypes: ParameterDTypes) -> None:
        """Asks the policy in which dtypes to gather and to reduce."""
        stored = self.sharded.dtype
        gathered = dtypes.gathered_dtype(self.name, stored)
        self.gather_spec = TensorSpec(shape=tuple(self.shape), dtype=gathered, dim=self.dim)
        self.reduce_dtype = dtypes.reduced_dtype(self.name, stored)

    # -- the swap ---------------------------------------------------------------------------------

    def _install(self, param: nn.Parameter) -> None:
        for place in self.places:
            place.module._parameters[place.name] = param

    def add_place(self, place: Place) -> None:
        """Makes one more module share this parameter."""
        self.places.append(place)
        place.module._parameters[place.name] = self.sharded

    def sync_requires_grad(self) -> None:
        """Gives both parameters the flag that was set on either since they last agreed.

        A user who freezes a module sets it on whichever is registered then.
        """
        flag = self._requires_grad
        if self.sharded.requires_grad == flag == self.unsharded.requires_grad:
            return
        changed = self.unsharded if self.unsharded.requires_grad != flag else self.sharded
        self._requires_grad = changed.requires_grad
        self.sharded.requires_grad_(self._requires_grad)
        self.unsharded.requires_grad_(self._requires_grad)

    def attach_unsharded(self, unsharded: nn.Parameter) -> None:
        """Takes ``unsharded``, whose memory is the group's, as the parameter that modules see."""
        self.unsharded = unsharded
        self._requires_grad = self.sharded.requires_grad
        unsharded.requires_grad_(self._requires_grad)

    def to_unsharded(self) -> None:
        """Puts the unsharded parameter into every place."""
        self.sync_requires_grad()
        self._install(self.unsharded)

    def to_sharded(self) -> None:
        """Puts the sharded parameter into every place."""
        self.sync_requires_grad()
        self._install(self.sharded)

    def adopt_registered(self) -> bool:
        """Takes over what the first place holds now, if something replaced the sharded parameter.

        ``to_empty``, ``to``, and loading with ``assign=True`` replace parameters. Tied places,
        which those treat one by one, are tied again. Returns whether anything changed.

        Raises:
            ValueError: if what it holds is not a ``DTensor`` sharded as this parameter was.
        """
        place = self.places[0]
        found = place.module._parameters.get(place.name)
        if found is self.unsharded and found is not self.sharded:
            return False
        if found is self.sharded and self.shard.dtype == self._stored_dtype:
            self._restore_attributes()
            self._install(self.sharded)
            return False
        if (
            not isinstance(found, DTensor)
            or found.placements != self.spec.placements
            or found.shape != self.shape
        ):
            raise ValueError(
                f"{self.name} was replaced by {_describe(found)}, but it must stay a DTensor of "
                f"shape {tuple(self.shape)} with placements {self.spec.placements}; change values "
                "in place, or load a state dict"
            )
        self.sharded = found
        self.spec = spec_of(found)
        self._stored_dtype = found.dtype
        self._restore_attributes()
        self._install(found)
        return True

    def _restore_attributes(self) -> None:
        for name, value in self._attributes.items():
            self.sharded.__dict__.setdefault(name, value)
        self._attributes = self.sharded.__dict__

    # -- the gradient -----------------------------------------------------------------------------

    @property
    def has_gradient(self) -> bool:
        """Whether an unsharded gradient waits to be reduced."""
        return self._accumulated is not None or (
            self.unsharded is not self.sharded and self.unsharded.grad is not None
        )

    def stash_gradient(self) -> None:
        """Moves what autograd left into the gradient accumulated in the reduce dtype.

        Where autograd's dtype is the reduce dtype, it stays in place: autograd goes on adding to
        it.
        """
        if self.unsharded is self.sharded or self.unsharded.grad is None:
            return
        grad = self.unsharded.grad
        if self._accumulated is not None:
            self._accumulated += grad
            self.unsharded.grad = None
        elif grad.dtype != self.reduce_dtype:
            self._accumulated = grad.to(self.reduce_dtype)
            self.unsharded.grad = None

    def take_gradient(self) -> torch.Tensor | None:
        """Returns the unsharded gradient since the last reduction, and forgets it."""
        if self._accumulated is not None:
            self.stash_gradient()
            grad, self._accumulated = self._accumulated, None
            return grad
        if self.unsharded is self.sharded:
            return None
        found, self.unsharded.grad = self.unsharded.grad, None
        if found is not None and found.layout != torch.strided:
            return found.to_dense()  # nn.Embedding(sparse=True): what is reduced is a fixed layout
        return found

    def zero_gradient(self, set_to_none: bool) -> None:
        """Clears the sharded gradient."""
        if self.sharded.grad is None:
            return
        if set_to_none:
            self.sharded.grad = None
        else:
            local_shard(self.sharded.grad).zero_()

    def add_sharded_gradient(self, reduced: torch.Tensor) -> None:
        """Adds this rank's part of the reduced gradient to ``sharded.grad``.

        Shape: the shard's; any dtype. With no gradient there yet, ``reduced`` itself becomes it.
        """
        home = self.staging.stage_out(reduced.to(self.sharded.dtype))
        if self.sharded.grad is None:
            self.sharded.grad = make_dtensor(home, self.spec)
        else:
            local_shard(self.sharded.grad).add_(home)

    def __repr__(self) -> str:
        """Shows name and shape."""
        return f"FSDPParam({self.name}, {tuple(self.shape)})"


def _describe(found: torch.Tensor | None) -> str:
    if isinstance(found, DTensor):
        return f"a DTensor of shape {tuple(found.shape)} with placements {found.placements}"
    if found is None:
        return "None"
    return f"a {type(found).__name__} of shape {tuple(found.shape)}"
