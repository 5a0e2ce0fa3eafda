"""One parameter of a group: shard, unsharded tensor, gradient, and the modules that hold it.

Owns the sharded parameter, which replaces the user's in every module that holds it, and the
unsharded gradient until it is reduced. Starts no collective and allocates no unsharded memory:
the group does both.

[Note: the tensors of a parameter] In the order in which a step meets them:

- *replaced*: the parameter that the module held before ``fully_shard``; see ``owner_of``.
- ``sharded``: a ``DTensor``, which the optimizer sees and modules hold while the group is sharded.
- ``shard``: its local part, where parameters live (on the host, with offload). Everything below is
  made of it.
- *on the device*: the shard where the model computes: with offload a copy, otherwise ``shard``.
- *sent*: what a gather sends, a view of that one, which the copy-in casts to ``sent``; see
  [Note: what travels]. On a two-level mesh, and in backward with an int for
  ``reshard_after_forward``, it is made of a larger *compute shard*.
- *write view*: the full tensor through which a gather writes, with a version counter of its own;
  see ``ParamStorage``, and [Note: own store] and [Note: two stores] for the memory.
- ``unsharded``: the same memory as modules see it, registered in them while the group is
  unsharded: a plain parameter, or the ``DTensor`` that a tensor parallel one was.
- ``unsharded.grad``: what autograd leaves.
- *kept*: the sum of gradients of backwards that do not communicate; see ``reduce.gradients``.
- *reduced*: this rank's part of the sum, in the reduce dtype, then in the shard's and where it
  lives.
- ``sharded.grad``: a ``DTensor`` over that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import TensorSpec
from fullshard.sharding.base.compat import (
    ShardingSpec,
    add_tensor_hook,
    local_shard,
    make_dtensor,
    set_local_shard,
    set_spec,
    spec_of,
    specs_of,
)
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.base.policies import declares
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo, device_of_mesh
from fullshard.sharding.params.lost_data import DataWatch
from fullshard.sharding.params.param_sharding import has_hooks, require_same_hooks, sharding_of
from fullshard.sharding.params.registry import registry_of
from fullshard.sharding.protocols import Offload, ParameterDTypes, WireForms

__all__ = ["Cut", "FSDPParam", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """A module that holds the parameter, and the name under which it does."""

    module: nn.Module
    name: str

    @property
    def held(self) -> nn.Parameter | None:
        """The parameter that the module holds at this place now."""
        return registry_of(self.module).get(self.name)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one parameter is to be sharded.

    Attributes:
        name: its name from the first module that holds it.
        places: every module and name that holds it.
        mesh_info: over which mesh.
        dim: the dim that is cut, counted from the first.
        walked: the modules in which the same ``fully_shard`` call looked for parameters.
    """

    name: str
    places: list[Place]
    mesh_info: FSDPMeshInfo
    dim: int
    walked: set[nn.Module]


class FSDPParam:
    """A sharded parameter.

    Attributes:
        name: full name from the root, for messages; set again when a root is found.
        places: every module and name that holds this parameter; tied weights have several.
        walked: the modules in which its ``fully_shard`` call looked for parameters.
        mesh_info: the process groups over which it is sharded and replicated.
        offload: decides where its shard is stored.
        sharding: how it is cut, gathered, used and reduced.
        dim: the dimension that is cut into shards.
        spec: the mesh, the placements and the global shape of ``sharded``.
        shape: the shape of the whole parameter.
        sharded: the parameter the optimizer sees: a ``DTensor`` with ``Shard(dim)``.
        unsharded: the parameter that modules use in forward and backward; ``sharded`` until the
            group allocates memory for it.
        gather_spec: shape, shard dim and dtype in which it is gathered.
        grad_spec: the same, in which its gradient is reduced.
        sent: what travels to be gathered.
        grad_sent: what travels of its gradient.
        device: where its modules compute.
        generation: its group's.
        dtypes: decides the dtypes in which it is gathered and reduced.
        group: its ``FSDPParamGroup``; see ``group_of``.
        on_gradient: called with each gradient before autograd accumulates it.
        notes: what packages above keep with it, by a name of their own.
        data_watch: notices ``sharded.data = new``.
        lands_in: the dtype in which reduced gradients stay as they are; None: none is known.
    """

    def __init__(
        self, param: nn.Parameter, cut: Cut, offload: Offload, dtypes: ParameterDTypes
    ) -> None:
        """Cut ``param`` and keep this rank's shard; the modules keep ``param`` for now.

        Args:
            param: the parameter.
            cut: how to cut it.
            offload: where the shard lives.
            dtypes: in which dtypes it is gathered and reduced.
        """
        self.name = cut.name
        self.places, self.walked = cut.places, cut.walked
        self.mesh_info = cut.mesh_info
        self.offload = offload
        self.dtypes = dtypes
        self.device = device_of_mesh(cut.mesh_info.mesh)
        self.generation = ParameterGeneration()
        self.group: object = None
        self.on_gradient: Callable[[torch.Tensor], None] = _ignore
        self.notes: dict[str, object] = {}
        self.sharding = sharding_of(param, cut.mesh_info, cut.dim, cut.name)
        self.dim = self.sharding.dim
        self.shape = torch.Size(param.shape)
        self.spec: ShardingSpec = self.sharding.spec
        self._stored_dtype = param.dtype
        self.sharded = self._cut(param)
        self.gather_spec = self.sent = self.sharding.spec_in(param.dtype)
        self.grad_spec = self.grad_sent = self.gather_spec
        self.unsharded: nn.Parameter = self.sharded  # until the group makes its storage
        self._requires_grad = param.requires_grad  # what both were given last
        self._attributes = self.sharded.__dict__  # swap_tensors, in .to(), takes it away
        self.lands_in: torch.dtype | None = None
        self.data_watch = DataWatch(self)
        self._asked: tuple[str, torch.dtype, bool] | None = None  # what the specs answer

    def _cut(self, param: nn.Parameter) -> nn.Parameter:
        local = self.shard_of(param.detach())
        require_same_hooks(self.name, param, local)
        sharded = nn.Parameter(
            make_dtensor(self.offload.store(local), self.spec), requires_grad=param.requires_grad
        )
        set_spec(sharded, self.spec)
        for name, value in param.__dict__.items():
            if name not in local.__dict__:  # put there by the user; else a subclass is made of it
                sharded.__dict__.setdefault(name, value)
        return sharded

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor of the parameter's shape: a contiguous copy.

        An error of a subclass names the parameter.
        """
        try:
            return self.sharding.shard_of(full)
        except Exception as error:
            error.add_note(f"while cutting {self.name}, {_describe(full)}, along dim {self.dim}")
            raise

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, as a plain tensor."""
        return local_shard(self.sharded)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype in which its gradient is reduced."""
        return self.grad_spec.dtype

    def resolve_dtypes(self, wire: WireForms) -> bool:
        """Ask in which dtypes to gather, to reduce and to send; return whether they changed.

        Policies answer by the name, the stored dtype, and whether the parameter has hooks around
        its gather. If none of them changed, they are not asked again.
        """
        name, stored, hooked = self.name, self.sharded.dtype, has_hooks(self.name, self.shard)
        if (name, stored, hooked) == self._asked:
            return False
        before = self.specs
        spec_in, dtypes = self.sharding.spec_in, self.dtypes
        self.gather_spec = self.sent = spec_in(dtypes.gathered_dtype(name, stored))
        self.grad_spec = self.grad_sent = spec_in(dtypes.reduced_dtype(name, stored))
        if (ranks := self.mesh_info.shard_world_size) > 1:
            if not hooked:  # which say themselves what travels
                self.sent = wire.gathered_as(name, self.gather_spec, ranks, self.device)
            sent = wire.reduced_as(name, self.grad_spec, ranks, self.device)
            self.grad_sent = before[-1] if sent == before[-1] else sent  # with what it has learned
        self._asked = name, stored, hooked
        return self.specs != before

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the parameter as gathered, sent, reduced, and sent for the reduction."""
        return self.gather_spec, self.sent, self.grad_spec, self.grad_sent

    # -- the swap ---------------------------------------------------------------------------------

    def install_sharded(self) -> None:
        """Put the sharded parameter into every place."""
        for place in self.places:
            place.module._parameters[place.name] = self.sharded

    def add_place(self, place: Place) -> None:
        """Make one more module share this parameter."""
        self.generation.replacements += 1
        self.places.append(place)
        place.module._parameters[place.name] = self.sharded

    def sync_requires_grad(self) -> None:
        """Give both parameters the flag that was set on either since they last agreed.

        A user who freezes a module sets it on whichever is registered then.
        """
        flag = self._requires_grad
        if self.sharded.requires_grad == flag == self.unsharded.requires_grad:
            return
        changed = self.unsharded if self.unsharded.requires_grad != flag else self.sharded
        # the method is refused in transforms
        self._requires_grad = self.sharded.requires_grad = changed.requires_grad
        self.unsharded.requires_grad = self._requires_grad

    def attach_unsharded(self, unsharded: nn.Parameter) -> None:
        """Take ``unsharded``, whose memory is the group's, as the parameter that modules see."""
        self.generation.replacements += 1
        self.unsharded = unsharded
        for name, value in self.sharded.__dict__.items():  # who owns it; what the user put on it
            unsharded.__dict__.setdefault(name, value)
        self._requires_grad = self.sharded.requires_grad
        unsharded.requires_grad = self._requires_grad
        add_tensor_hook(unsharded, self.on_gradient)

    def adopt_registered(self) -> bool:
        """Take over what the first place holds now, if something replaced the sharded parameter.

        ``to_empty``, ``to``, and loading with ``assign=True`` replace parameters. Tied places,
        which those treat one by one, are tied again. Returns whether anything changed.

        Raises:
            ValueError: if the first place holds no parameter, or a tensor with different sharding.
        """
        self.generation.replacements += 1
        place = self.places[0]
        found = place.held
        if found is self.unsharded and found is not self.sharded:
            return False
        same = found is self.sharded and self.shard.dtype == self._stored_dtype
        if not same:
            self._replace(found)
        elif specs_of([found]) == [self.spec]:  # torch gives it an equal one that it met before
            set_spec(self.sharded, self.spec)
        for name, value in self._attributes.items():
            self.sharded.__dict__.setdefault(name, value)
        self._attributes = self.sharded.__dict__
        self.lands_in = None
        if not self.shard.is_meta:
            set_local_shard(self.sharded, self.offload.store(self.shard))
        self.install_sharded()
        self.data_watch = DataWatch(self)
        return not same

    def _replace(self, found: nn.Parameter | None) -> None:
        """Make ``found`` the sharded parameter."""
        if (
            not (isinstance(found, DTensor) and isinstance(found, nn.Parameter))
            or found.placements != self.spec.placements
            or found.shape != self.shape
        ):
            raise ValueError(
                f"{self.name} was replaced by {_describe(found)}, as an assignment or "
                "torch.func.functional_call does, but it must stay a parameter that is a DTensor "
                f"of shape {tuple(self.shape)} with placements {self.spec.placements}; change "
                "values in place, load a state dict, or make the new one of the "
                "sharded parameter, as torch.empty_like(param) does"
            )
        require_same_hooks(self.name, self.sharded, found)
        self.sharded = found
        self.spec = spec_of(found)
        self._stored_dtype = found.dtype

    def restore_data(self) -> None:
        """Give the sharded parameter the metadata of its shard again, and watch it."""
        self.sharded.data = make_dtensor(self.shard, self.spec)
        self.data_watch = DataWatch(self)

    # -- the gradient -----------------------------------------------------------------------------

    @property
    def autograd_grad(self) -> torch.Tensor | None:
        """The full gradient that autograd left."""
        return None if self.unsharded is self.sharded else self.unsharded.grad

    def to_reduce(self, left: torch.Tensor) -> torch.Tensor:
        """Return a gradient that autograd left, as it is reduced.

        Shape: that of ``gather_spec``, a plain tensor.
        """
        if left.requires_grad:
            left = left.detach()  # backward(create_graph=True)
        is_dense = self.sharding.travels_whole and left.layout is torch.strided
        return left if is_dense else self.sharding.to_reduce(left, self.reduce_dtype)

    def drop_gradient(self) -> None:
        """Discard the gradient that autograd left, without communication."""
        if self.unsharded is not self.sharded:
            self.unsharded.grad = None

    def zero_gradient(self, set_to_none: bool) -> None:
        """Clear the sharded gradient."""
        if set_to_none:
            self.sharded.grad = None
        elif self.sharded.grad is not None:
            local_shard(self.sharded.grad).zero_()

    def stage_gradient(self, reduced: torch.Tensor) -> torch.Tensor:
        """Begin to bring this rank's part of the reduced gradient where the parameter lives.

        Shape: that of a shard of ``gather_spec``; any dtype.
        """
        stored = reduced.to(self.shard.dtype)
        staged = self.sharding.to_store(self.offload.stage_out(stored))
        # a policy that may stage is asked each time, whatever it returned
        stays = declares(self.offload, "stages_out_nothing") and staged is reduced
        self.lands_in = reduced.dtype if stays else None
        return staged

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickles as None: a copy of a sharded parameter is an ordinary ``DTensor``."""
        return type(None), ()

    def __repr__(self) -> str:
        """Show name and shape."""
        return f"FSDPParam({self.name}, {tuple(self.shape)})"


def _ignore(gradient: torch.Tensor) -> None:
    """Do nothing: no group owns the parameter yet."""


def _describe(found: torch.Tensor | None) -> str:
    if isinstance(found, DTensor):
        return f"a DTensor of shape {tuple(found.shape)} with placements {found.placements}"
    if found is None:
        return "None"
    return f"a {type(found).__name__} of shape {tuple(found.shape)}"
