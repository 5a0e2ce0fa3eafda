"""The memory of a group's unsharded parameters: storage resized to 0 and back.

Owns one storage per group and the tensors over it. [Note: own store] An autograd graph may hold
aliases of an unsharded parameter (a linear saves ``weight.t()``), so as long as the group lives its
unsharded parameters are the same tensors over the same storage, and every gather refills it. The
storage is never handed to another group. Filling goes through tensors made with ``set_``: they
share the storage but not the version counter of the parameter, else autograd would take a refill
for a change in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fullshard.comm import TensorSpec

__all__ = ["OwnStore", "offsets_of", "view_of"]

_ALIGNMENT = 64  # bytes: a cache line, and more than any vector load asks for


class OwnStore:
    """The unsharded memory of one group.

    Attributes:
        fills: per parameter the tensor through which a gather writes, full shape, gathered dtype.
        params: per parameter the tensor that the modules see.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        device: torch.device,
        to_use: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ) -> None:
        """Makes the tensors; no memory stays allocated.

        Args:
            specs: what is gathered.
            device: where.
            to_use: per spec, what the modules see of what was gathered, in the same memory.
        """
        self.specs = tuple(specs)
        offsets, self.nbytes = offsets_of(self.specs)
        with torch.inference_mode(False), torch.no_grad():
            base = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            self._storage = base.untyped_storage()
            self.fills = [
                view_of(self._storage, spec, offset, device)
                for spec, offset in zip(self.specs, offsets, strict=True)
            ]
            self.params = [
                nn.Parameter(
                    used(view_of(self._storage, spec, offset, device)), requires_grad=False
                )
                for spec, offset, used in zip(self.specs, offsets, to_use, strict=True)
            ]
            self._seen = [param.data for param in self.params]
        self._storage.resize_(0)

    @property
    def allocated(self) -> bool:
        """Whether the memory is there now."""
        return self._storage.nbytes() == self.nbytes

    def put_params(self, tensors: Sequence[torch.Tensor] | None = None) -> None:
        """Makes the parameters lie where ``tensors`` do; by default in this memory."""
        seen = self._seen if tensors is None else tensors
        with torch.inference_mode(False):
            for param, tensor in zip(self.params, seen, strict=True):
                param.data = tensor

    def allocate(self) -> None:
        """Gets the memory, on the current stream."""
        if not self.allocated:
            self._storage.resize_(self.nbytes)

    def free(self) -> None:
        """Gives the memory back, on the current stream."""
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
