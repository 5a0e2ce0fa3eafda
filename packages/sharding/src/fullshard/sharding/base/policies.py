"""The policies of a module: the answers in torch's own fields, and the check of what came.

Owns the meaning of torch's policy objects, ``require``, which checks a policy once, and the object
that holds the answers for one module. Policies with more to say than torch's extend these in
``fullshard.policies``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fullshard.comm.spi import can_pin, traits_of
from fullshard.sharding.base.tensors import map_tensors, with_attributes_of
from fullshard.sharding.base.torch_objects import converted
from fullshard.sharding.protocols import (
    NoOffload,
    Offload,
    PrecisionPolicy,
    PrefetchPolicy,
    ReshardPolicy,
    WireForms,
)

__all__ = ["FieldPrecision", "FullPrecision", "OffloadToCPU", "Policies", "declares", "require"]

_CPU = torch.device("cpu")
_P = TypeVar("_P")


@dataclass(frozen=True)
class FieldPrecision:
    """Mixed precision of one module in torch's fields: the answers of torch's policy object.

    Attributes:
        param_dtype: dtype in which parameters are gathered and the module computes; None: their
            own.
        reduce_dtype: dtype in which gradients are reduced; None: the dtype of the computation.
        output_dtype: dtype to which the module's outputs are cast; None: as they come.
        cast_forward_inputs: cast the module's inputs to ``param_dtype``.
        param_dtype_override_fn: chooses for each parameter, when it is given to ``fully_shard``:
            the parameter's own dtype keeps that; ``param_dtype`` or None follow ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    @property
    def casts_nothing(self) -> bool:
        """Whether inputs and outputs stay unchanged: if so, no code asks how to cast them."""
        mine, ours = type(self), FieldPrecision
        inherited = (mine.cast_input, mine.cast_output) == (ours.cast_input, ours.cast_output)
        return inherited and self.param_dtype is None and self.output_dtype is None

    def for_parameter(self, param: nn.Parameter) -> FieldPrecision:
        """Return what answers for ``param``: this, or a copy with its own ``param_dtype``.

        Raises:
            ValueError: if ``param_dtype_override_fn`` returns anything but None, ``param_dtype`` or
                the dtype of ``param``.
        """
        if self.param_dtype_override_fn is None:
            return self
        chosen = self.param_dtype_override_fn(param)
        follows = chosen is None or chosen is self.param_dtype
        if not follows and chosen is not param.dtype:
            raise ValueError(
                f"param_dtype_override_fn returned {chosen!r} for a parameter in {param.dtype}; "
                f"return {param.dtype} to keep that, or None for param_dtype, which is "
                f"{self.param_dtype}"
            )
        dtype = self.param_dtype if follows else None
        return replace(self, param_dtype=dtype, param_dtype_override_fn=None)

    def gathered_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return ``param_dtype`` for a floating-point parameter, if it is set."""
        return (self.param_dtype or dtype) if dtype.is_floating_point else dtype

    def reduced_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return ``reduce_dtype``, or the dtype of the computation."""
        gathered = self.gathered_dtype(name, dtype)
        return (self.reduce_dtype or gathered) if dtype.is_floating_point else gathered

    def cast_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a floating-point input in ``param_dtype``, if so asked."""
        casts = self.param_dtype is not None and self.cast_forward_inputs
        return _cast(tensor, self.param_dtype) if casts else tensor

    def cast_output(self, output: Any) -> Any:
        """Return the output with floating-point tensors in ``output_dtype``, if it is set."""
        dtype = self.output_dtype
        return output if dtype is None else map_tensors(partial(_cast, dtype=dtype), output)


@dataclass(frozen=True)
class FullPrecision(FieldPrecision):
    """The identity precision: every parameter is gathered and reduced in its own dtype."""


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return with_attributes_of(tensor, tensor.to(dtype)) if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class OffloadToCPU(NoOffload):
    """Shards, gradients and optimizer state on the CPU: the answers of torch's offload policy.

    Attributes:
        pin_memory: keep them in page-locked memory, from which copies do not block the host.
            Without an accelerator there is nothing to pin for.
    """

    pin_memory: bool = True

    def home(self, device: torch.device) -> torch.device:
        """Return the CPU."""
        return _CPU

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Return ``shard``, if it lives on the CPU in page-locked memory where that helps."""
        pins = self.pin_memory and can_pin(shard.device)
        return shard.pin_memory() if pins else shard

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy of ``shard`` on ``device``, made on the current stream."""
        return shard.to(device, non_blocking=True)

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return ``gradient`` on the CPU; on its way there if memory is pinned."""
        return self._to_cpu(gradient)

    def stage_step(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return ``tensor`` on the CPU, where the state lives."""
        return self._to_cpu(tensor)

    def arrived(self, device: torch.device) -> None:
        """Blocks the host until the current stream of ``device`` is empty."""
        traits = traits_of(device)
        if traits.streams:
            torch.accelerator.current_stream(device).synchronize()
        elif traits.queued:
            torch.get_device_module(device).synchronize()

    def _to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == _CPU.type:
            return tensor
        # torch puts the target of such a copy into page-locked memory
        return tensor.to(_CPU, non_blocking=self.pin_memory)


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The answers that hold for one sharded module and its groups.

    Attributes:
        precision: in which dtypes to gather, reduce and compute.
        offload: where shards and gradients live.
        reshard: what stays unsharded.
        prefetch: what is gathered ahead.
        wire: in what form shards and gradients travel.
    """

    precision: PrecisionPolicy
    offload: Offload
    reshard: ReshardPolicy
    prefetch: PrefetchPolicy
    wire: WireForms


def require(protocol: type[_P], value: object, argument: str) -> _P:
    """Return ``value``, which has every member that ``protocol`` asks for.

    For torch's own policy object it returns what answers by its fields.

    Args:
        protocol: a protocol of ``protocols``, or another.
        value: the policy that came.
        argument: the name of the argument it came as, for the message.

    Raises:
        TypeError: naming what is missing.
    """
    if isinstance(value, type):
        raise TypeError(
            f"{argument} is the class {value.__name__}; pass an instance: {value.__name__}()"
        )
    policy = converted(value, _TORCHS)
    members = [name for name in dir(protocol) if not name.startswith("_")]
    missing = [name for name in members if not callable(getattr(policy, name, None))]
    if not missing:
        return cast(_P, policy)
    raise TypeError(
        f"{argument} is a {type(value).__name__}, which lacks {', '.join(missing)}; pass an "
        f"instance of a policy of fullshard.policies, or any object with the methods of "
        f"{protocol.__name__}"
    )


def declares(policy: object, name: str) -> bool:
    """Return whether a policy declares ``name``, such as ``casts_nothing``, to be true.

    Only the package's own policies have to declare anything: a user's own may lack the name, and is
    then asked each time. A policy that passes unknown names on to another policy (``__getattr__``)
    declares nothing: the answer would be about the methods of the other policy.
    """
    declared = hasattr(type(policy), name) or name in getattr(policy, "__dict__", ())
    return declared and bool(getattr(policy, name))


_TORCHS = {
    "MixedPrecisionPolicy": FieldPrecision,
    "CPUOffloadPolicy": OffloadToCPU,
    "OffloadPolicy": NoOffload,
}
