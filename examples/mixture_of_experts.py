"""Train a mixture of experts that is spread over ranks: experts have a mesh of their own.

Start it on an even number of ranks; half of the experts live on each of two ranks of a pair::

    torchrun --standalone --nproc-per-node=4 mixture_of_experts.py

A token goes to the expert that its router chose, on any rank, and comes back: two all-to-all
exchanges per layer. Attention and router are sharded over all ranks. An expert is sharded over the
ranks with equal experts, by ``ShardPlacementResult`` with their mesh. Gradients are divided by the
number of all ranks, since an expert has summed over tokens from all ranks. ``clip_grad_norm_`` over
the group of all ranks counts each expert once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import one_hot

from fullshard.optim import clip_grad_norm_
from fullshard.sharding import (
    FSDPMeshInfo,
    FSDPModule,
    ShardPlacementResult,
    fully_shard,
)

WIDTH, EXPERTS, LAYERS = 32, 4, 2


class Exchange(torch.autograd.Function):
    """Rows to other ranks, ``sent[i]`` of them to rank i, and their gradients back."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group) -> Tensor:
        """Return the received rows, ``received[i]`` of them from rank i."""
        ctx.sizes, ctx.group = (sent, received), group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradients of the rows, on the rank that sent them."""
        sent, received = ctx.sizes
        returned = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(returned, gradient.contiguous(), sent, received, group=ctx.group)
        return returned, None, None, None


class Expert(nn.Module):
    """A layer of four times the width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] to the same."""
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """A router, and the experts of this rank; with no group, all of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.ranks = 1 if group is None else group.size()
        self.router = nn.Linear(WIDTH, EXPERTS)
        everyone = [Expert() for _ in range(EXPERTS)]  # drawn alike on all ranks; most are dropped
        mine = EXPERTS // self.ranks
        first = 0 if group is None else mine * group.rank()
        self.experts = nn.ModuleList(everyone[first : first + mine])

    def forward(self, x: Tensor) -> Tensor:
        """Send each of the tokens, [tokens, width], through the expert of its highest score."""
        weights = self.router(x).softmax(dim=-1)
        weight, choice = weights.max(dim=-1)
        order = choice.argsort(stable=True)  # by expert, so by rank
        counts = one_hot(choice, EXPERTS).sum(dim=0)
        out = self._through_experts(x[order], counts)
        return torch.empty_like(out).index_copy(0, order, out) * weight[:, None]

    def _through_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        if self.group is None:
            parts = rows.split(counts.tolist())
            return torch.cat([one(part) for one, part in zip(self.experts, parts, strict=True)])
        incoming = torch.empty_like(counts)  # for each rank, its tokens for each expert of mine
        dist.all_to_all_single(incoming, counts, group=self.group)
        sent = counts.view(self.ranks, -1).sum(dim=1).tolist()
        received = incoming.view(self.ranks, -1).sum(dim=1).tolist()
        arrived = Exchange.apply(rows, sent, received, self.group)
        pieces = arrived.split(incoming.tolist())  # [rank, expert] in one row
        mine = len(self.experts)
        by_expert = [torch.cat(pieces[number::mine]) for number in range(mine)]
        done = [one(part) for one, part in zip(self.experts, by_expert, strict=True)]
        back = [list(part.split([len(p) for p in pieces[n::mine]])) for n, part in enumerate(done)]
        together = torch.cat([back[n][rank] for rank in range(self.ranks) for n in range(mine)])
        return Exchange.apply(together, received, sent, self.group)


class Layer(nn.Module):
    """Parameters of every rank, and a mixture."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mixture = Mixture(group)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, width] to the same."""
        return x + self.mixture(self.mix(self.norm(x)))


def make_model(group: dist.ProcessGroup | None) -> nn.Sequential:
    """Equal values on every rank, for any subset of experts."""
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(group) for _ in range(LAYERS)], nn.Linear(WIDTH, WIDTH))


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """A group for the common part of each layer, over all ranks, and one for its experts."""
    same_experts = FSDPMeshInfo(mesh["expert_data"])

    def place(param: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, same_experts) if param in of_experts else None

    for layer in model[:-1]:
        of_experts = set(layer.mixture.experts.parameters())
        fully_shard(layer, shard_placement_fn=place)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(dist.get_world_size())
    return model


def batch(step: int, rank: int) -> Tensor:
    """Tokens of one rank, [64, width]; the task is to double their absolute values."""
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The squared distance to twice the absolute values."""
    return (model(tokens) - 2 * tokens.abs()).square().mean()


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains; returns the mean losses over ranks. The process group is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--expert-ranks", type=int, default=2, help="that share all experts (2)")
    options = parser.parse_args(arguments)
    shape = (dist.get_world_size() // options.expert_ranks, options.expert_ranks)
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"
    mesh = init_device_mesh(device, shape, mesh_dim_names=("expert_data", "expert"))
    model = shard(make_model(mesh.get_group("expert")).to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(options.steps):
        loss = loss_of(model, batch(step, dist.get_rank()).to(device))
        loss.backward()
        clip_grad_norm_(model, 1.0, process_group=dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
