"""Move parameters and gradients by a transport of your own: a ring of sends and receives.

::

    torchrun --standalone --nproc-per-node=4 own_transport.py

A transport is an object with ``in_place``, ``all_gather`` and ``reduce_scatter`` over flat buffers.
This one sends each slice on to the right neighbour, N - 1 times, so that every link carries as much
as any other: replace ``_pass_on`` with what your wire speaks. The script trains with it and
without, and compares losses.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.comm import DefaultAllGather, DefaultReduceScatter
from fullshard.sharding import FSDPModule, fully_shard


@dataclass
class RingTransport:
    """An all-gather and a reduce-scatter as rings.

    Attributes:
        in_place: the input of a gather may be this rank's slice of the output.
        sent: bytes that this rank has sent so far.
    """

    in_place: bool = True
    sent: int = field(default=0)

    def all_gather(
        self, output: Tensor, input: Tensor, process_group: dist.ProcessGroup, async_op: bool
    ) -> None:
        """Fills ``output``, [N * n], with every rank's ``input``, [n], in the order of ranks."""
        rank, size = process_group.rank(), process_group.size()
        slices = output.chunk(size)
        slices[rank].copy_(input)  # no copy where it is that slice
        for step in range(size - 1):
            self._pass_on(
                slices[(rank - step) % size], slices[(rank - step - 1) % size], process_group
            )

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        process_group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool,
    ) -> None:
        """Leaves in ``output``, [n], the sum or mean of this rank's slice of inputs, [N * n]."""
        rank, size = process_group.rank(), process_group.size()
        slices = input.chunk(size)  # may be overwritten: each ends as a partial sum
        arrived = torch.empty_like(output)
        for step in range(size - 1):
            self._pass_on(slices[(rank - step - 1) % size], arrived, process_group)
            slices[(rank - step - 2) % size].add_(arrived)
        output.copy_(slices[rank])
        if op == dist.ReduceOp.AVG:
            output /= size

    def _pass_on(self, out: Tensor, into: Tensor, process_group: dist.ProcessGroup) -> None:
        rank, size = process_group.rank(), process_group.size()
        right, left = (rank + 1) % size, (rank - 1) % size
        sending = dist.isend(out.contiguous(), group=process_group, group_dst=right)
        dist.recv(into, group=process_group, group_src=left)
        sending.wait()
        self.sent += out.nbytes


def make_model() -> nn.Sequential:
    """Four layers; the same values at each call, on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)])


def train(transport: RingTransport | None, steps: int = 10) -> list[float]:
    """Trains over a transport, or the default one; returns this rank's losses."""
    model = make_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if transport is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(DefaultAllGather(transport=transport))
                module.set_custom_reduce_scatter(DefaultReduceScatter(transport=transport))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        inputs = torch.randn(16, 32, generator=drawn).to(next(model.parameters()).device)
        loss = (model(inputs) - inputs.relu()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> tuple[list[float], list[float]]:
    """Both runs' losses; the process group is there."""
    ring = RingTransport()
    ours, default = train(ring), train(None)
    if dist.get_rank() == 0:
        furthest = max(abs(one - other) for one, other in zip(ours, default, strict=True))
        print(f"losses differ by {furthest:.1e} at most; rank 0 sent {ring.sent} bytes")
    return ours, default


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
