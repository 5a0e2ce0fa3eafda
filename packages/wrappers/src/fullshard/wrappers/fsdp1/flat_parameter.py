"""Attributes of a flat parameter, which an FSDP1 instance shows but does not have.

Owns the attributes of torch's ``FlatParameter`` that libraries use. Accelerate casts parameters to
float32, and verl moves them to the CPU and back. The parameters themselves are in ``parameters()``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fullshard.sharding.spi import local_shard, sharded_of
from fullshard.wrappers.fsdp1.instance import Instance

__all__ = ["FlatParameter", "FlatParameterHandle"]


class FlatParameterHandle:
    """A handle of the flat parameter, for libraries that move it.

    Attributes:
        flat_param: a view of the instance's parameters.
    """

    def __init__(self, instance: Instance) -> None:
        """View the parameters of ``instance``."""
        self._instance = instance
        self.flat_param = FlatParameter(instance)
        self._offload_params = instance.arguments.offload.offload_params
        self._orig_param_dtype = self.flat_param.dtype  # setting it changes nothing

    def flat_param_to(self, device: torch.device, non_blocking: bool = False) -> None:
        """Move this rank's shards to ``device``."""
        self._instance.convert_parameters(torch.device(device), non_blocking=non_blocking)


@dataclass(frozen=True)
class _Values:
    """The values of all parameters on this rank, as a dtype that they have or are to get."""

    dtype: torch.dtype
    instance: Instance

    def to(self, dtype: torch.dtype) -> _Values:
        """Return them cast; setting them as ``data`` does it."""
        return replace(self, dtype=dtype)

    def size(self) -> torch.Size:
        """Return the number of elements, as the shape of a flat tensor."""
        return torch.Size([sum(shard.numel() for shard in self._shards)])

    def data_ptr(self) -> int:
        """Return the address of the first shard."""
        return self._shards[0].data_ptr()

    @property
    def _shards(self) -> list[torch.Tensor]:
        return [local_shard(sharded_of(each)) for _, each in self.instance.own_parameters()]


class FlatParameter:
    """All parameters of one instance."""

    def __init__(self, instance: Instance) -> None:
        """Look at them whenever it is asked."""
        self._instance = instance
        self._local_shard = self.data  # setting it changes nothing

    @property
    def _fqns(self) -> list[str]:
        """Their names, from the instance on."""
        return [name for name, _ in self._instance.own_parameters()]

    @property
    def dtype(self) -> torch.dtype:
        """Their dtype; that of the fewest bytes, if they differ."""
        dtypes = [param.dtype for _, param in self._instance.own_parameters()]
        return min(dtypes, key=lambda dtype: dtype.itemsize)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return next(param.device for _, param in self._instance.own_parameters())

    @property
    def requires_grad(self) -> bool:
        """Whether any is trained."""
        return any(param.requires_grad for _, param in self._instance.own_parameters())

    @property
    def data(self) -> _Values:
        """Their values, which can only be cast."""
        return _Values(self.dtype, self._instance)

    @data.setter
    def data(self, values: _Values) -> None:
        """Cast them to the dtype of ``values``."""
        self._instance.convert_parameters(values.dtype)
