"""Offload on a simulated accelerator, where the device's memory and the host's are both the CPU's.

Owns the copies between them, which a policy of offload leaves out if both are one device. When they
are made, on which stream, and what waits for them is the real policy's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch

from fullshard.policies import CPUOffloadPolicy
from fullshard.sharding import OffloadToCPU

__all__ = ["HostMemory", "offloading"]


class HostMemory(Protocol):
    """Which tensors' memory is the host's; of all others it is the device's."""

    def keep_on_host(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's memory is the host's."""
        ...

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether it is."""
        ...

    def making(self, *, on_host: bool) -> AbstractContextManager[None]:
        """A context in which new memory is the host's, or the device's."""
        ...


@contextmanager
def offloading(memory: HostMemory, *, steps: bool) -> Iterator[None]:
    """Inside the ``with`` block ``CPUOffloadPolicy`` copies between a device and its host.

    Args:
        memory: knows which memory is the host's.
        steps: whether parameters and gradients travel to where the optimizer steps, too. The
            engine waits for them by the device of a tensor, which is the CPU for both here.
    """

    def lives_on_host(policy: Any) -> bool:
        return bool(getattr(policy, "parameters", True))

    def move(tensor: torch.Tensor, *, to_host: bool) -> torch.Tensor:
        if to_host == memory.is_on_host(tensor):
            return tensor
        with memory.making(on_host=to_host):
            made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return made.copy_(tensor)

    def store(policy: Any, shard: torch.Tensor) -> torch.Tensor:
        if lives_on_host(policy):
            memory.keep_on_host(shard)
        return shard

    def stage_in(policy: Any, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        return move(shard, to_host=False)

    def stage_out(policy: Any, gradient: torch.Tensor) -> torch.Tensor:
        return move(gradient, to_host=True) if lives_on_host(policy) else gradient

    def stage_step(policy: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        to_host = bool(getattr(policy, "optimizer_state", True))
        if not tensor.numel():  # asked whether it would move: a tensor where the shards live
            return tensor if to_host == lives_on_host(policy) else torch.empty_like(tensor)
        return move(tensor, to_host=to_host)

    answers: dict[str, Any] = {"store": store, "stage_in": stage_in, "stage_out": stage_out}
    if steps:
        answers["stage_step"] = stage_step
    with ExitStack() as stack:
        for policy in (OffloadToCPU, CPUOffloadPolicy):
            for name, answer in answers.items():
                stack.enter_context(patch.object(policy, name, answer))
        yield
