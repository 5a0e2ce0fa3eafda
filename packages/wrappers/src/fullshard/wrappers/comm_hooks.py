"""Functions that reduce gradients, for ``register_comm_hook``, under torch's names.

Owns the default one, two that send less, and their states. A hook divides by itself: half before
the sum and half after it, so that nothing overflows. Hooks written for torch have the same
arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fullshard.comm import default_reduce_scatter
from fullshard.comm.spi import default_transport
from fullshard.wire import sum_widened

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


@dataclass
class DefaultState:
    """The process group of a hook, and the factors by which it divides.

    Attributes:
        process_group: the ranks.
        world_size: how many they are.
        gradient_predivide_factor: a power of 2 near the root of that, divided by before the sum.
        gradient_postdivide_factor: the rest, divided by after it.
    """

    process_group: dist.ProcessGroup
    world_size: int = field(init=False)
    gradient_predivide_factor: float = field(init=False)
    gradient_postdivide_factor: float = field(init=False)

    def __post_init__(self) -> None:
        """Compute the factors.

        Raises:
            ValueError: if there is no process group.
        """
        if self.process_group is None:
            raise ValueError(
                "process_group is None; pass the one that reduces: model.process_group"
            )
        self.world_size = dist.get_world_size(self.process_group)
        factor = 1
        while self.world_size % factor == 0 and self.world_size / factor > factor:
            factor *= 2
        self.gradient_predivide_factor = float(factor)
        self.gradient_postdivide_factor = self.world_size / factor


@dataclass
class LowPrecisionState(DefaultState):
    """The state of a hook that sends less.

    Attributes:
        parameter_type: the dtype to which the result is cast.
    """

    parameter_type: torch.dtype = torch.float32


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Averages ``grad`` (any shape) over the ranks in place; for NO_SHARD."""
    grad.div_(state.gradient_predivide_factor)
    # The engine's own way, so that the bits are those without a hook.
    group, whole = state.process_group, grad.contiguous()
    default_transport(group).all_reduce(whole, dist.ReduceOp.SUM, group, False)
    torch.div(whole, state.gradient_postdivide_factor, out=grad)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Put this rank's part of the mean of ``grad`` (``[world * n]``) into ``output`` (``[n]``)."""
    grad.div_(state.gradient_predivide_factor)
    # as above
    collective = default_reduce_scatter(state.process_group)
    collective(output, grad, state.process_group, dist.ReduceOp.SUM)
    output.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Averages as the other two do, with ``torch.float16`` on the wire.

    Parts of sharded gradients are added in the dtype of ``output``, where torch's hook adds what
    travels; with NO_SHARD it adds in fp16, as torch's does.
    """
    _compressed(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Averages as the other two do, with ``torch.bfloat16`` on the wire.

    Parts of sharded gradients are added in the dtype of ``output``, where torch's hook adds what
    travels; with NO_SHARD it adds in bf16, as torch's does.
    """
    _compressed(torch.bfloat16, state, grad, output)


def _compressed(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    sent = grad.to(dtype)
    if output is None:
        sent.div_(state.gradient_predivide_factor)
        dist.all_reduce(sent, group=state.process_group)
        sent.div_(state.gradient_postdivide_factor)
        grad.copy_(sent.to(state.parameter_type))
        return
    sum_widened(output, sent, state.process_group)
    output.copy_(output.div_(state.world_size).to(state.parameter_type))
