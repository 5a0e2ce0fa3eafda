"""How a group's shards become full parameters: the contract, the memory, and the ordinary way.

Owns what unshard strategies share: the memory of a group's unsharded parameters, and the inputs of
a gather. There is one class for each way: shards are packed into buffers (here), gathered in shared
memory or used directly in a world of one (both in ``in_place``), or processed by hooks of the
parameters (``hooked``). A group's is chosen at its first gather, from facts that all ranks share.
``compute_shards`` sends other shards, and finishes through buffers. A strategy keeps
nothing of a gather in flight. The policy of offload knows where shards live, and moves them.

[Note: own store] An autograd graph may hold aliases of an unsharded parameter (a linear saves
``weight.t()``). Therefore the unsharded parameters keep their tensors and their storage as long as
the group lives. The storage is resized to 0 and back, and every gather refills it. The storage is
never handed to another group. Filling goes through tensors made with ``set_``: they share the
storage but not the version counter of the parameter, else autograd would take a refill for a change
in place.

[Note: two stores] If ranks share memory, a group is gathered in a buffer that all ranks map, and
its parameters are stored there. Whether a gather is such a one follows from facts that all ranks
share. Each rank decides independently where its parameters are: a user's ``unshard()`` gets private
memory, to which the shared buffer is copied, since a user may write; and while a graph lives they
stay where its forward had them. The end of a graph, which ranks notice at different times,
therefore changes no collective. If a graph lives, an ``unsharded`` block makes the pages in which
its aliases are private to this rank, with their contents, until the next reshard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fullshard.comm import AllGatherInFlight, GatherConfig, Layout, TensorSpec
from fullshard.comm.spi import FullTensors, OwnShards, foreach_copy
from fullshard.sharding.base.compat import local_shard_getter, retire_aliases
from fullshard.sharding.base.memory import addresses_of, set_data
from fullshard.sharding.base.policies import declares
from fullshard.sharding.base.tensors import is_plain
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.param_sharding import ParamSharding

__all__ = [
    "BufferedUnshard",
    "FinishesGather",
    "GatherInputs",
    "Holders",
    "ParamStorage",
    "UnshardStrategy",
    "UnshardedMemory",
    "ViewFns",
    "offsets_of",
    "view_of",
]

_stored = local_shard_getter("sharded")
_ALIGNMENT = 64  # bytes: a cache line, and more than any vector load asks for

ViewFns = Sequence[Callable[[torch.Tensor], torch.Tensor]]
"""Per parameter, what the modules see of what was gathered, in the same memory."""


# -- memory ---------------------------------------------------------------------------------------


class Holders(NamedTuple):
    """The holders of the full parameters of a group: where they may be follows from it.

    Attributes:
        user_may_write: a user holds them, who may write: they are to be in private memory.
        in_block: a ``with unsharded(...)`` block holds them: they must be in private memory.
        no_graph_alias: no graph holds an alias of them: they may move to other memory.
    """

    user_may_write: bool
    in_block: bool
    no_graph_alias: bool


class ParamStorage:
    """Memory for a group's unsharded parameters, always allocated unless a subclass frees it.

    Attributes:
        specs: what is gathered.
        write_views: per parameter the tensor through which it is written, of full shape and the
            gathered dtype.
        param_views: per parameter what the modules see.
        outlives_groups: a graph that holds an alias keeps the memory itself, so parameters may
            always move on from here.
        stays: ``free`` leaves the memory and the values where they are.
    """

    outlives_groups = False
    stays = False

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        places: Sequence[tuple[torch.Tensor, int]],
        to_use: ViewFns,
    ) -> None:
        """Make the tensors. ``places``: per tensor, the owner of its storage and the offset."""
        self.specs = tuple(specs)
        with torch.inference_mode(False), torch.no_grad():
            self.write_views, again = (
                [view_of(*place, spec) for place, spec in zip(places, specs, strict=True)]
                for _ in range(2)
            )
            self.param_views = [used(view) for used, view in zip(to_use, again, strict=True)]

    def allocate(self) -> None:
        """Make the memory private to this rank for writing, on the current stream."""

    def make_private(self) -> None:
        """Give this rank private memory with the present values, at the same addresses."""

    def free(self) -> None:
        """Free the memory on the current stream; later calls do nothing."""


class UnshardedMemory(ParamStorage):
    """The parameters that modules see, and this rank's private memory, which holds them at first.

    Attributes:
        params: per parameter the tensor that the modules see.
        home: where they lie: here, or in other memory.
        on_free: functions to call when it is freed, for further memory.
        to_use: what modules see of each.
    """

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device, to_use: ViewFns) -> None:
        """Make the tensors on ``device``; no memory stays allocated."""
        offsets, self.nbytes = offsets_of(specs)
        with torch.inference_mode(False), torch.no_grad():
            base = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            self._storage = base.untyped_storage()
            super().__init__(specs, [(base, offset) for offset in offsets], to_use)
            self.params = [nn.Parameter(tensor, requires_grad=False) for tensor in self.param_views]
        self._storage.resize_(0)
        self.home: ParamStorage = self
        self.on_free: Sequence[Callable[[], None]] = ()
        self.to_use = to_use

    @property
    def can_move(self) -> bool:
        """Whether parameters can move to other memory: tensor parallel ones are DTensors."""
        return all(is_plain(param) for param in self.params)

    def repoint(self, home: ParamStorage, holders: Holders) -> None:
        """Store the parameters in ``home``, this or other memory, if they may leave theirs."""
        if home is not self.home and (holders.no_graph_alias or self.home.outlives_groups):
            if not self.home.outlives_groups:
                retire_aliases(self.params)  # a graph that no hook belongs to may hold some
            self.home = home
            self.put_back()

    def point_at(self, home: ParamStorage, holders: Holders) -> None:
        """Store the parameters in the filled ``home``, or copy from it if they cannot move.

        Args:
            home: filled memory, which may already hold the parameters; given back if it was copied.
            holders: who holds them. For a user who may write, they are stored here.
        """
        self.repoint(self if holders.user_may_write else home, holders)
        if self.home is not home:
            self.fill_from(home.write_views)
            home.free()

    def put_back(self) -> None:
        """Point parameters that a user moved back to the memory that gathers fill."""
        with torch.inference_mode(False):
            for param, tensor in zip(self.params, self.home.param_views, strict=True):
                set_data(param, tensor)

    @torch.no_grad()
    def fill_from(self, tensors: Sequence[torch.Tensor]) -> None:
        """Cast and copy ``tensors`` to the parameters."""
        self.home.allocate()
        foreach_copy(self.home.write_views, tensors)

    def allocate(self) -> None:
        """Allocate the memory, on the current stream."""
        if not self._storage.nbytes():
            self._storage.resize_(self.nbytes)

    def free(self) -> None:
        """Free this memory, the parameters' memory, and further memory.

        With ``stays``, the memory keeps its address until a ``free`` without ``stays``.
        """
        if self.home is not self:
            self.home.free()
        for free in self.on_free:
            free()
        if not self.stays:
            self._storage.resize_(0)


def offsets_of(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Return where each full tensor begins in one block of memory, in bytes, and its size."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        nbytes = spec.numel * spec.dtype.itemsize
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def view_of(base: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    """Return the full tensor ``offset`` bytes into ``base``, with a version counter its own."""
    flat = torch.empty(0, dtype=spec.dtype, device=base.device)
    shape = torch.Size(spec.shape)
    strides = torch.empty(shape, device="meta").stride()
    return flat.set_(base.untyped_storage(), offset // spec.dtype.itemsize, shape, strides)


# -- what is sent ---------------------------------------------------------------------------------


class GatherInputs:
    """The inputs of gathers of the same parameters, brought to the device and checked.

    Gathers send the same object again while the shards live where they are sent from. Where they
    live elsewhere, each gather has copies of its own, made on the stream that reads them.

    Attributes:
        params: the parameters.
        layout: of a gather of all.
        as_stored: whether gathers send the shards themselves, not copies.
        cuts_full: whether the full parameters are read when a forward has ended.
    """

    cuts_full = False

    def __init__(
        self, params: Sequence[FSDPParam], layout: Layout, shardings: Sequence[ParamSharding] = ()
    ) -> None:
        """Take the parameters in the order of ``layout``.

        ``shardings``: what makes a stored shard travel; empty: the parameters' own.
        """
        self.params = tuple(params)
        self.layout = layout
        self._shardings = tuple(shardings) or tuple([param.sharding for param in params])
        self.as_stored = all(declares(each.offload, "stages_in_nothing") for each in params)
        self._shards: list[torch.Tensor] = []
        self._addresses: list[int] = []  # of those
        self._sent: OwnShards | None = None  # made of those

    def sends(self, config: GatherConfig) -> OwnShards:
        """Return what a gather sends: one object as long as gathers send the shards themselves."""
        shards = list(map(_stored, self.params))
        sent, addresses = self._sent, addresses_of(shards)
        same = addresses == self._addresses and all(map(is_, shards, self._shards))
        if sent is None or not same:
            pairs = zip(self._shardings, self.staged(config), strict=True)
            travel = [sharding.to_travel(each) for sharding, each in pairs]
            sent = OwnShards(travel, self.layout, config)
            if self.as_stored:
                self._shards, self._addresses, self._sent = shards, addresses, sent
        return sent

    @property
    def has_copies(self) -> bool:
        """Whether the next gather starts from copies of the stored shards."""
        return False

    def forget_copies(self) -> None:
        """Make the next gather start from the stored shards, as it does here."""

    def keep_copies(self, full: Sequence[torch.Tensor], config: GatherConfig) -> None:
        """Make copies for the next gather from what a gather wrote, where ``cuts_full``."""

    def arrived(self, param: FSDPParam) -> torch.Tensor:
        """Return the stored shard of ``param`` with the values that a gather delivers."""
        return param.sent.rounded(param.shard, param.mesh_info.shard_rank)

    def staged(self, config: GatherConfig) -> Sequence[torch.Tensor]:
        """Return each parameter's shard on the device, as the copy-in stream sees it.

        Copies are made on that stream, which alone reads them.
        """
        shards = list(map(_stored, self.params))
        if self.as_stored:
            return shards
        with config.streams.use(config.streams.copy_in):
            pairs = zip(self.params, shards, strict=True)
            return [param.offload.stage_in(shard, config.device) for param, shard in pairs]


# -- the contract ---------------------------------------------------------------------------------


class FinishesGather(Protocol):
    """The end of a gather in flight: of a group by itself, or of several at once."""

    def finish(self, in_flight: Any, holders: Holders) -> None:
        """Wait for the gather, and make the unsharded parameters from its result.

        Args:
            in_flight: the gather, which is used up.
            holders: who holds the full parameters.
        """

    def discard(self, in_flight: Any) -> None:
        """Wait for a gather whose result is not needed."""


class UnshardStrategy(FinishesGather, ABC):
    """How a group is gathered, and where to.

    A group has one gather at a time: a launch, then ``finish`` or ``discard``. Freeing the memory
    ends either.

    Attributes:
        memory: of the parameters.
        inputs: what is sent.
    """

    def __init__(self, memory: UnshardedMemory, inputs: GatherInputs) -> None:
        """Store the memory of the parameters and the inputs of a gather."""
        self.memory = memory
        self.inputs = inputs

    @property
    def write_views(self) -> Sequence[torch.Tensor]:
        """The tensors that a gather writes, in the order of the layout."""
        return self.memory.home.write_views

    @abstractmethod
    def launch(self, config: GatherConfig, *, async_op: bool) -> object:
        """Launch the gather of what is sent now, and return it.

        ``async_op`` asks for a work handle, on accelerators too.
        """


class BufferedUnshard(UnshardStrategy):
    """The ordinary way: shards are packed, gathered, and copied out into private memory."""

    def __init__(self, memory: UnshardedMemory, inputs: GatherInputs) -> None:
        """Store the memory of the parameters and the inputs of a gather."""
        super().__init__(memory, inputs)
        self._full: dict[int, FullTensors] = {}  # by layout: a post-forward mesh has its own

    def launch(self, config: GatherConfig, *, async_op: bool) -> AllGatherInFlight:
        """Pack this rank's shards and gather them."""
        return self.inputs.sends(config).gather(config, async_op=async_op)

    def finish(self, in_flight: AllGatherInFlight, holders: Holders) -> None:
        """Wait and copy out: to private memory, unless a graph keeps other memory."""
        memory = self.memory
        if memory.home is not memory:  # of a replaced collective
            memory.repoint(memory, holders)
        home, layout = memory.home, in_flight.layout
        home.allocate()
        full = self._full.get(id(layout)) if home is memory else None
        if full is None:
            full = FullTensors(self.write_views, layout, in_flight.config)
            if home is memory:
                self._full[id(layout)] = full
        full.fill(in_flight)

    def discard(self, in_flight: AllGatherInFlight) -> None:
        """Wait for a gather whose result is not needed."""
        in_flight.discard()
