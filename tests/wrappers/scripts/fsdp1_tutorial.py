"""A script for PyTorch's FSDP1, as its tutorials have it: wrap by size, train, evaluate, save.

The test runs this text as it is, and with the modules of its import lines changed. Prints one line
of JSON on rank 0.
"""

import argparse
import functools
import json
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Loader = DataLoader[tuple[torch.Tensor, ...]]
Sampler = DistributedSampler[tuple[torch.Tensor, ...]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.fc1 = nn.Linear(128, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(count: int, seed: int) -> TensorDataset:
    """Images with one bright quarter, and which it is."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 12, 12, generator=generator)
    labels = torch.arange(count) % 4
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[0, 6 * row : 6 * row + 6, 6 * column : 6 * column + 6] += 1
    return TensorDataset(images, labels)


def train(
    model: FSDP,
    loader: Loader,
    optimizer: torch.optim.Optimizer,
    epoch: int,
    sampler: Sampler,
) -> float:
    model.train()
    total = torch.zeros(2)
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data).float(), target, reduction="sum")
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        total += torch.tensor([loss.item(), len(data)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def test(model: FSDP, loader: Loader) -> float:
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for data, target in loader:
            right = model(data).argmax(dim=1).eq(target).sum()
            total += torch.tensor([right.item(), len(data)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, test_set = digits(64, 0), digits(32, 1)
    sampler: Sampler = DistributedSampler(train_set, rank=rank, num_replicas=world, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    test_loader = DataLoader(
        test_set, batch_size=8, sampler=Sampler(test_set, rank=rank, num_replicas=world)
    )
    model = FSDP(
        Net(),
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=500),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if args.bf16 else None,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        cpu_offload=CPUOffload(offload_params=False),
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for epoch in range(args.epochs):
        losses.append(train(model, train_loader, optimizer, epoch, sampler))
        scheduler.step()
    accuracy = test(model, test_loader)

    dist.barrier()
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        states = model.state_dict()
    if rank == 0:
        torch.save(states, os.path.join(args.folder, "model.pt"))
        fresh = Net()
        fresh.load_state_dict(torch.load(os.path.join(args.folder, "model.pt")))
        checksum = sum(p.double().sum().item() for p in fresh.parameters())
        print(json.dumps({"losses": losses, "accuracy": accuracy, "checksum": checksum}))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--folder", default=".")
    main(parser.parse_args())
