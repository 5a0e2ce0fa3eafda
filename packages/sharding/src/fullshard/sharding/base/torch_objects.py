"""Objects of ``torch.distributed.fsdp``, read by their fields: what they mean here.

Libraries build torch's policies, mesh dims and placements before anybody can hand in ours. Owns how
such an object is known, by the name and module of its class, as no package imports
``torch.distributed.fsdp``, and the answers to the questions of ``protocols`` that torch's policies
stand for. Policies with more to say than torch's extend these in ``fullshard.policies``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeVar, cast

import torch

from fullshard.comm.runtime.devices import can_pin, traits_of
from fullshard.sharding.base.tensors import map_tensors

__all__ = ["FieldPrecision", "OffloadToCPU", "converted", "torchs_class"]

_CPU = torch.device("cpu")
_T = TypeVar("_T")


def torchs_class(value: object) -> str | None:
    """Returns the name of the class of ``torch.distributed.fsdp`` that ``value`` is of, or None.

    A subclass that somebody wrote counts as the class of torch that it extends.
    """
    for kind in type(value).__mro__:
        if f"{kind.__module__}.".startswith("torch.distributed.fsdp."):
            return kind.__name__
    return None


def converted(value: _T, kinds: Mapping[str, Any]) -> _T:
    """Returns ours with the fields of ``value``, if it is torch's; else ``value`` itself.

    Args:
        value: what came: an instance of a dataclass, or a member of an enum.
        kinds: our classes by the names of torch's.
    """
    kind = kinds.get(torchs_class(value) or "")
    if kind is None:
        return value
    if issubclass(kind, Enum):
        member: _T = kind[cast(Enum, value).name]
        return member
    names = [each.name for each in fields(kind) if each.init and hasattr(value, each.name)]
    ours: _T = kind(**{name: getattr(value, name) for name in names})
    return ours


@dataclass(frozen=True)
class FieldPrecision:
    """Mixed precision of one module in torch's four fields: what its own policy object says.

    Attributes:
        param_dtype: dtype in which parameters are gathered and the module computes; None: their
            own.
        reduce_dtype: dtype in which gradients are reduced; None: the dtype of the computation.
        output_dtype: dtype to which the module's outputs are cast; None: as they come.
        cast_forward_inputs: cast the module's inputs to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def gathered_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Returns ``param_dtype`` for a floating-point parameter, if it is set."""
        return (self.param_dtype or dtype) if dtype.is_floating_point else dtype

    def reduced_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Returns ``reduce_dtype``, or the dtype of the computation."""
        gathered = self.gathered_dtype(name, dtype)
        return (self.reduce_dtype or gathered) if dtype.is_floating_point else gathered

    def keeps_casts(self) -> bool:
        """Returns False: each gather casts on the way."""
        return False

    def cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the inputs with floating-point tensors in ``param_dtype``, if so asked."""
        if self.param_dtype is None or not self.cast_forward_inputs:
            return args, kwargs
        inputs: tuple[tuple[Any, ...], dict[str, Any]] = _cast((args, kwargs), self.param_dtype)
        return inputs

    def cast_output(self, output: Any) -> Any:
        """Returns the output with floating-point tensors in ``output_dtype``, if it is set."""
        return output if self.output_dtype is None else _cast(output, self.output_dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, value)


@dataclass(frozen=True)
class OffloadToCPU:
    """Shards, gradients and optimizer state on the CPU: what torch's own offload policy says.

    Attributes:
        pin_memory: keep them in page-locked memory, from which copies do not block the host.
            Without an accelerator there is nothing to pin for.
    """

    pin_memory: bool = True

    def home(self, device: torch.device) -> torch.device:
        """Returns the CPU."""
        return _CPU

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns ``shard``, if it lives on the CPU in page-locked memory where that helps."""
        pins = self.pin_memory and can_pin(shard.device)
        return shard.pin_memory() if pins else shard

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy of ``shard`` on ``device``, made on the current stream."""
        return shard.to(device, non_blocking=True)

    def keeps_staged(self) -> bool:
        """Returns False: nothing stays on the device between uses."""
        return False

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns ``gradient`` on the CPU; on its way there if memory is pinned."""
        return self._to_cpu(gradient)

    def stage_step(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns ``tensor`` on the CPU, where the state lives."""
        return self._to_cpu(tensor)

    def arrived(self, device: torch.device) -> None:
        """Blocks the host until the current stream of ``device`` is empty."""
        if traits_of(device).streams:
            torch.accelerator.current_stream(device).synchronize()

    def _to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == _CPU.type:
            return tensor
        # torch puts the target of such a copy into page-locked memory
        return tensor.to(_CPU, non_blocking=self.pin_memory)
