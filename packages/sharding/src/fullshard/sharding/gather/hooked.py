"""Gathers a group of which some parameters have hooks around their gather.

The hooks are torch's ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``: methods of this rank's
part of a parameter, of a tensor subclass or put on the tensor, as ``float8`` weights have them. The
pre-gather hook returns any number of tensors, which are gathered in place of the shard; buffers
contain these tensors and the shards of other parameters; the post-gather hook makes the unsharded
parameter from the gathered tensors, and later refills this parameter (``out=``).

[Note: memory of hooks] Tensors that were gathered for a hook have their own storages, which the
unsharded parameter may keep or view; the hook returns further tensors that it made. Resharding
empties all these storages, and they are allocated again before the next call of the hook. If the
unsharded parameter does not view the gathered tensors, the subclass may have them freed at once
(``fsdp_should_release_all_gather_outputs_after_post_all_gather``, of torch 2.15).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm import AllGatherInFlight, GatherConfig, Layout, TensorSpec
from fullshard.comm.spi import OwnShards, rank_major
from fullshard.sharding.base.compat import storage_of
from fullshard.sharding.gather.strategy import (
    BufferedUnshard,
    GatherInputs,
    Holders,
    UnshardedMemory,
)
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.param_sharding import GATHER_HOOKS, has_hooks

__all__ = ["HookedInputs", "HookedUnshard"]

_PRE, _POST = GATHER_HOOKS
_RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class HookedInputs(GatherInputs):
    """Tensors that hooks give for some parameters, and the shards of other parameters."""

    def __init__(self, params: Sequence[FSDPParam], layout: Layout, precision: object) -> None:
        """Take the parameters, and the precision policy, which is passed to hooks."""
        super().__init__(params, layout)
        self._precision = precision

    @cached_property
    def hooked(self) -> list[HookedParam | None]:
        """Per parameter what calls its hooks, if it has any.

        Raises:
            ValueError: if a hook cannot be called.
        """
        return [
            HookedParam(param, self._precision) if has_hooks(param.name, param.shard) else None
            for param in self.params
        ]

    @torch.no_grad()
    def sends(self, config: GatherConfig) -> OwnShards:
        """Return the shards to send now; hooks run on the stream that will read their results."""
        shards: list[torch.Tensor] = []
        specs: list[TensorSpec] = []
        staged = self.staged(config)
        with config.streams.use(config.streams.copy_in):
            for param, hooked, shard in zip(self.params, self.hooked, staged, strict=True):
                if hooked is None:
                    shards.append(param.sharding.to_travel(shard))
                    specs.append(param.sent)
                else:
                    shards.extend(hooked.shards(shard))
                    specs.extend(hooked.specs)
        self.layout = rank_major(tuple(specs), self.layout.world_size, 0)
        return OwnShards(shards, self.layout, config)


class HookedUnshard(BufferedUnshard):
    """The gather of a group in which hooks make some parameters, and memory holds the others."""

    def __init__(self, memory: UnshardedMemory, inputs: HookedInputs) -> None:
        """Take the memory of the parameters without hooks."""
        super().__init__(memory, inputs)
        self._all = inputs.hooked
        self._hooked = [hooked for hooked in inputs.hooked if hooked is not None]
        memory.on_free = [self._free_hooked]

    def _free_hooked(self) -> None:
        for hooked in self._hooked if not self.memory.stays else ():
            hooked.free()

    @property
    def write_views(self) -> Sequence[torch.Tensor]:
        """The tensors that a gather writes, in the order of the parameters."""
        plain = iter(self.memory.write_views)
        return [
            fill
            for hooked in self._all
            for fill in ([next(plain)] if hooked is None else hooked.write_views)
        ]

    @torch.no_grad()
    def finish(self, in_flight: AllGatherInFlight, holders: Holders) -> None:
        """Unpack, and call the hooks on the tensors that were gathered for them."""
        for hooked in self._hooked:
            hooked.allocate()
        super().finish(in_flight, holders)
        for hooked in self._hooked:
            hooked.complete()
            if hooked.releases and not self.inputs.cuts_full:
                hooked.free_gathered()


# -- one parameter with hooks ---------------------------------------------------------------------


class HookedParam:
    """One parameter with hooks.

    Attributes:
        param: the parameter.
        specs: of the tensors that are gathered for it; empty before the first gather.
        releases: whether these may be freed as soon as the unsharded parameter is made.
    """

    def __init__(self, param: FSDPParam, policy: object) -> None:
        """Inspect the hooks.

        Args:
            param: whose hooks.
            policy: the module's precision policy, which is passed to the hooks.

        Raises:
            ValueError: if they cannot be called.
        """
        self.param = param
        self.specs: tuple[TensorSpec, ...] = ()
        self._policy = policy
        self._mesh = _shard_mesh(param)
        self._world_size = param.mesh_info.shard_world_size
        self._uneven = bool(param.sharding.shape[param.dim] % self._world_size)
        _require_supported(param, self._uneven)
        self._takes_all = _takes_all(param)
        self.releases = _releases(param)
        self._outputs: list[UnshardedMemory] = []  # each for one gathered tensor
        self._metadata: Any = None
        self._made: list[tuple[torch.UntypedStorage, int]] = []  # by the hook, with their sizes
        self._unsharded: nn.Parameter | None = None

    # -- before the gather ------------------------------------------------------------------------

    def shards(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return what the hook gives for ``shard``, padded to the same size on all ranks."""
        hook = cast(Any, shard).fsdp_pre_all_gather
        if self._takes_all:
            size = self.param.sharding.shape
            stride = torch.empty(size, device="meta").stride()
            module = self.param.places[0].module
            given = hook(self._mesh, size, stride, module, self._policy)
        else:
            given = hook(self._mesh)
        if not isinstance(given, tuple) or len(given) != 2:
            raise self._wrong(_PRE, f"a {type(given).__name__}", "(tensors to gather, metadata)")
        inputs, self._metadata = given
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        padded = [self._padded(each, shard.size(0)) for each in inputs]
        specs = tuple(self._spec_of(each) for each in padded)
        if not self._outputs:
            self.specs = specs
            self._outputs = [UnshardedMemory([s], self.param.device, [torch.detach]) for s in specs]
        if specs != self.specs:
            raise self._wrong(_PRE, f"{specs}", f"what it did before, {self.specs}")
        return padded

    def _padded(self, given: object, rows: int) -> torch.Tensor:
        """Return a tensor of the hook, padded to the size on the rank with most rows."""
        if not isinstance(given, torch.Tensor):
            raise self._wrong(_PRE, f"a {type(given).__name__} to gather", "plain tensors")
        tensor = given.reshape(1) if given.ndim == 0 else given
        if not self._uneven:
            return tensor
        whole = self.param.gather_spec.chunk_rows(self._world_size)
        rest = self.param.sharding.shape[1:]
        if tensor.shape[1:] != rest or tensor.size(0) not in (rows, whole):
            raise self._wrong(
                _PRE,
                f"a tensor of shape {tuple(tensor.shape)}",
                f"tensors of its shard's shape {(rows, *rest)} or padded to {(whole, *rest)}, as "
                f"{tuple(self.param.sharding.shape)} is not even over {self._world_size} ranks",
            )
        if tensor.size(0) == whole:
            return tensor
        padded = tensor.new_zeros((whole, *rest))
        padded[: tensor.size(0)].copy_(tensor)
        return padded

    def _spec_of(self, shard: torch.Tensor) -> TensorSpec:
        """Return the spec of all ranks' tensors, joined as the shards are."""
        dim = self.param.dim if shard.shape == self.param.shard.shape else 0
        shape = list(shard.shape)
        shape[dim] *= self._world_size
        return TensorSpec(shape=tuple(shape), dtype=shard.dtype, dim=dim)

    # -- after it ---------------------------------------------------------------------------------

    @property
    def write_views(self) -> list[torch.Tensor]:
        """The tensors that a gather writes."""
        return [output.write_views[0] for output in self._outputs]

    def allocate(self) -> None:
        """Allocate the memory to gather into."""
        for output in self._outputs:
            output.allocate()

    def complete(self) -> None:
        """Make the unsharded parameter, or fill the existing one."""
        hook = cast(Any, self.param.shard).fsdp_post_all_gather
        outputs = tuple(output.param_views[0] for output in self._outputs)
        dtype = self.param.gather_spec.dtype
        if self._unsharded is not None:
            for storage, nbytes in self._made:
                if storage.nbytes() != nbytes:
                    storage.resize_(nbytes)
            hook(outputs, self._metadata, dtype, out=self._unsharded)
            return
        with torch.inference_mode(False), torch.no_grad():
            given = hook(outputs, self._metadata, dtype)
            if not isinstance(given, tuple) or len(given) != 2:
                what = "(the unsharded tensor, the tensors to free)"
                raise self._wrong(_POST, f"a {type(given).__name__}", what)
            tensor, made = given
            used = self.param.sharding.to_use(self._trimmed(tensor))
            self._unsharded = nn.Parameter(used, requires_grad=False)
        storages = {storage_of(each): each.untyped_storage() for each in (*made, *outputs)}
        for each in outputs:
            storages.pop(storage_of(each), None)
        self._made = [(storage, storage.nbytes()) for storage in storages.values()]
        self.param.attach_unsharded(self._unsharded)

    def _trimmed(self, tensor: object) -> torch.Tensor:
        """Return what the hook made, without the padding at its end."""
        size = self.param.sharding.shape
        stride = torch.empty(size, device="meta").stride()
        if not isinstance(tensor, torch.Tensor) or tensor.numel() < size.numel():
            came = f"of shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else ""
            raise self._wrong(_POST, f"a {type(tensor).__name__} {came}", f"one of {tuple(size)}")
        if tensor.shape == size and tensor.stride() == stride:
            return tensor
        return tensor.as_strided(size, stride)

    def free_gathered(self) -> None:
        """Give the memory back to which it was gathered."""
        for output in self._outputs:
            output.free()

    def free(self) -> None:
        """Give all memory back."""
        self.free_gathered()
        for storage, _ in self._made:
            storage.resize_(0)

    def _wrong(self, hook: str, came: str, wanted: str) -> ValueError:
        return ValueError(
            f"{hook} of {self.param.name}, a {type(self.param.shard).__name__}, gave {came}; it "
            f"must give {wanted}"
        )


def _shard_mesh(param: FSDPParam) -> DeviceMesh:
    """Return the 1-D mesh that shards.

    Raises:
        ValueError: if it is an axis without a name.
    """
    mesh = param.mesh_info.mesh
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"{param.name} has {_PRE}, which is given the mesh that shards, but the axes of "
            f"{mesh} have no names; pass mesh_dim_names to init_device_mesh"
        )
    return mesh[mesh.mesh_dim_names[param.mesh_info.shard_mesh_dim or 0]]


def _require_supported(param: FSDPParam, uneven: bool) -> None:
    if param.shape == torch.Size(()):
        raise ValueError(f"{param.name} has {_PRE} and no dimension; make it a 1-D tensor")
    if uneven and param.dim != 0:
        raise ValueError(
            f"{param.name} has {_PRE} and is cut along dim {param.dim}, where "
            f"{tuple(param.sharding.shape)} is not even over {param.mesh_info.shard_world_size} "
            "ranks; with hooks only dim 0 may be uneven"
        )


def _takes_all(param: FSDPParam) -> bool:
    """Return whether the hook takes all that torch gives (True), or the mesh only (False).

    Raises:
        ValueError: if it has neither.
    """
    signature = inspect.signature(cast(Any, param.shard).fsdp_pre_all_gather)
    if len(signature.parameters) not in (1, 5):
        raise ValueError(
            f"{_PRE} of {param.name} has the signature {signature}; it must take (mesh, "
            "outer_size, outer_stride, module, mp_policy), or the mesh only"
        )
    return len(signature.parameters) == 5


def _releases(param: FSDPParam) -> bool:
    """Return the answer of the method ``_RELEASES``; False if there is none.

    Raises:
        ValueError: if the answer is not a bool.
    """
    method = getattr(param.shard, _RELEASES, None)
    given = False if method is None else method()
    if not isinstance(given, bool):
        raise ValueError(
            f"{_RELEASES} of {param.name}, a {type(param.shard).__name__}, gave {given!r}; it must "
            "give True or False"
        )
    return given
