"""A program written for torch's ``fully_shard``, with types; mypy reads it."""

from __future__ import annotations

import torch
from torch import nn

from fullshard.wrappers.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def shard(model: Net, offload: bool) -> FSDPModule:
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=precision, offload_policy=policy, reshard_after_forward=True)
    return fully_shard(model, mp_policy=precision, ignored_params=set())


def train(model: Net) -> None:
    fully_shard(nn.Linear(2, 2)).set_requires_gradient_sync(False)
    root = shard(model, offload=False)
    root.set_is_last_backward(True)
    root.set_modules_to_forward_prefetch([root])
    handle: UnshardHandle | None = root.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    parts: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    several: list[FSDPModule] = fully_shard(parts)
    share_comm_ctx(several)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(False, recurse=False)
            module.reshard()
    register_fsdp_forward_method(model, "forward")
    model(torch.ones(2, 4)).sum().backward()


# What is wrong stays wrong: mypy would complain of an ignore that nothing needs.
fully_shard(nn.Linear(2, 2)).set_requires_gradient_sync("no")  # type: ignore[arg-type]
fully_shard(nn.Linear(2, 2), reshard_after_forwards=True)  # type: ignore[call-overload]
