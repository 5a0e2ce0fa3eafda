"""The memory of a group's unsharded parameters, and where they lie now.

Owns one storage per group, resized to 0 and back, the tensors over it, and the parameters that
modules see, which may be moved to another ``Home`` and back. [Note: own store] An autograd graph
may hold aliases of an unsharded parameter (a linear saves ``weight.t()``), so as long as the group
lives its unsharded parameters are the same tensors over the same storage, and every gather refills
it. The storage is never handed to another group. Filling goes through tensors made with ``set_``:
they share the storage but not the version counter of the parameter, else autograd would take a
refill for a change in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from fullshard.comm import TensorSpec
from fullshard.comm.runtime.compat import foreach_copy

__all__ = ["Home", "ToUse", "UnshardedMemory", "offsets_of", "view_of"]

_ALIGNMENT = 64  # bytes: a cache line, and more than any vector load asks for

ToUse = Sequence[Callable[[torch.Tensor], torch.Tensor]]
"""Per parameter, what the modules see of what was gathered, in the same memory."""


class Home(Protocol):
    """Memory in which a group's unsharded parameters can lie.

    Attributes:
        fills: per parameter the tensor through which it is written, full shape, gathered dtype.
        seen: per parameter what the modules see.
        kept_by_graphs: a graph that holds an alias keeps the memory itself, so parameters may
            always move on from here.
    """

    fills: list[torch.Tensor]
    seen: list[torch.Tensor]
    kept_by_graphs: bool

    def allocate(self) -> None:
        """Makes sure that this rank alone may write to it; on the current stream."""
        ...

    def free(self) -> None:
        """Gives it back, on the current stream; later calls do nothing."""
        ...


class UnshardedMemory:
    """The parameters that modules see, and memory of this rank alone, in which they lie at first.

    Attributes:
        specs: what is gathered.
        params: per parameter the tensor that the modules see.
        home: where they lie: here, or in other memory.
        fills: see ``Home``.
        seen: see ``Home``.
        kept_by_graphs: False.
    """

    kept_by_graphs = False

    def __init__(self, specs: Sequence[TensorSpec], device: torch.device, to_use: ToUse) -> None:
        """Makes the tensors on ``device``; no memory stays allocated."""
        self.specs = tuple(specs)
        offsets, self.nbytes = offsets_of(self.specs)
        with torch.inference_mode(False), torch.no_grad():
            base = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            self._storage = storage = base.untyped_storage()
            self.fills = [
                view_of(storage, spec, offset, device)
                for spec, offset in zip(self.specs, offsets, strict=True)
            ]
            self.params = [
                nn.Parameter(used(view_of(storage, spec, offset, device)), requires_grad=False)
                for spec, offset, used in zip(self.specs, offsets, to_use, strict=True)
            ]
            self.seen = [param.data for param in self.params]
        self._storage.resize_(0)
        self.home: Home = self

    @property
    def movable(self) -> bool:
        """Whether parameters can lie in other memory: tensor parallel ones are DTensors."""
        return all(type(param) is nn.Parameter for param in self.params)

    def move(self, home: Home, *, movable: bool) -> None:
        """Makes the parameters lie in ``home``, if they may leave where they lie.

        Args:
            home: this, or other memory.
            movable: no graph holds an alias of them.
        """
        if home is not self.home and (movable or self.home.kept_by_graphs):
            self.home = home
            self.put_back()

    def put_back(self) -> None:
        """Makes parameters that a user moved lie where gathers put them."""
        with torch.inference_mode(False):
            for param, tensor in zip(self.params, self.home.seen, strict=True):
                param.data = tensor

    def take_private(self, *, movable: bool) -> None:
        """Copies unsharded parameters where a user may write, if they lie elsewhere.

        Args:
            movable: no graph holds an alias of them.
        """
        before = self.home
        self.move(self, movable=movable)
        if self.home is not before:
            self.fill_from(before.fills)
            before.free()

    @torch.no_grad()
    def fill_from(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies ``tensors``, cast, to where the parameters lie."""
        self.home.allocate()
        foreach_copy(self.home.fills, tensors)

    def allocate(self) -> None:
        """Gets the memory, on the current stream."""
        if not self._storage.nbytes():
            self._storage.resize_(self.nbytes)

    def free(self) -> None:
        """Gives the memory back, and that in which parameters lie; on the current stream."""
        if self.home is not self:
            self.home.free()
        self._storage.resize_(0)


def offsets_of(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Returns where each full tensor begins in one block of memory, in bytes, and its size."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        nbytes = spec.numel * spec.dtype.itemsize
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def view_of(
    storage: torch.UntypedStorage, spec: TensorSpec, offset: int, device: torch.device
) -> torch.Tensor:
    """Returns the full tensor ``offset`` bytes into ``storage``, with a version counter its own."""
    flat = torch.empty(0, dtype=spec.dtype, device=device)
    shape = torch.Size(spec.shape)
    strides = torch.empty(shape, device="meta").stride()
    return flat.set_(storage, offset // spec.dtype.itemsize, shape, strides)
