"""Pretrain a GPT-2 shaped model on a folder of text, as a nanoGPT training script does, on shards.

Start it with torchrun, on one host or several; requires only torch and fullshard::

    torchrun --standalone --nproc-per-node=2 nanogpt.py --data '*.txt' --out runs/gpt
    torchrun --standalone --nproc-per-node=2 nanogpt.py --data '*.txt' --out runs/gpt --resume

Differences from a script for DistributedDataParallel are marked with ``# fullshard``: six places.
There is no ``no_sync`` to leave out, no ``module.`` in front of names and no unwrapping to save:
the model stays the model. Weights stay float32 on shards; what is gathered and computed in is
bfloat16, so autocast and the scaler go.
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from fullshard.optim import clip_grad_norm_
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import full_state_dict, fully_shard


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model, and how it is trained; each is an option of the command line."""

    data: str = "*.txt"
    out: str = "runs/gpt"
    layers: int = 6
    heads: int = 6
    width: int = 192
    context: int = 128
    dropout: float = 0.0
    rows: int = 8  # per micro-batch of one rank
    accumulate: int = 2  # micro-batches of one step
    steps: int = 200
    warmup: int = 20
    rate: float = 1e-3
    decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int = 50
    dtype: str = "bfloat16"
    seed: int = 1337
    resume: bool = False


class Block(nn.Module):
    """Attention and a layer of four times the width, each on what a norm gives."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, self.heads, self.dropout = config.width, config.heads, config.dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, time, width] to the same."""
        rows, time, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(rows, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(rows, time, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Bytes, [rows, time], to scores of the next, [rows, time, 256]; input and output share."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(256, config.width)
        self.place = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, 256, bias=False)
        self.out.weight = self.token.weight  # tied: fullshard needs no setting
        for name, param in self.named_parameters():
            if param.ndim > 1:
                depth = 2 * config.layers if name.endswith(("project.weight", "down.weight")) else 1
                nn.init.normal_(param, std=0.02 / math.sqrt(depth))

    def forward(self, data: Tensor) -> Tensor:
        """Scores of the byte after each."""
        x = self.token(data) + self.place(torch.arange(data.shape[1], device=data.device))
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def read_bytes(pattern: str) -> tuple[Tensor, Tensor]:
    """All files as one tensor of bytes: nine tenths to train on, and what is held out."""
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise SystemExit(f"--data {pattern}: no file has such a name")
    text = b"\n".join(Path(path).read_bytes() for path in paths)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def windows(data: Tensor, config: Config, seed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, [rows, context], drawn by a seed: after a resume, the same ones."""
    drawn = torch.Generator().manual_seed(hash(tuple(seed)) % 2**63)
    starts = torch.randint(len(data) - config.context - 1, (config.rows, 1), generator=drawn)
    rows = data[starts + torch.arange(config.context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def rate_at(step: int, config: Config) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < config.warmup:
        return config.rate * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def build(config: Config, device: torch.device) -> nn.Module:
    """The model on shards: a group for each block, one for the rest."""
    torch.manual_seed(config.seed)  # the same initial values on every rank
    model = GPT(config).to(device)
    dtype = getattr(torch, config.dtype)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:  # fullshard
        fully_shard(block, mp_policy=precision)
    return fully_shard(model, mp_policy=precision)  # fullshard


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.decay}]
    groups += [{"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.rate, betas=(0.9, 0.95))


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, config: Config, device: torch.device) -> float:
    """The mean loss over eight batches of each rank, in nats; every rank calls."""
    model.eval()
    losses = []
    for number in range(8):
        inputs, targets = windows(data, config, (config.seed, dist.get_rank(), number, -1))
        scores = model(inputs.to(device)).float()
        losses.append(cross_entropy(scores.flatten(0, 1), targets.to(device).flatten()))
    model.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, config: Config) -> None:
    """Each rank writes its shards; the step's folder counts once ``latest`` names it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)  # fullshard: works on shards
    state = {"model": model_state, "optimizer": optimizer_state}
    folder = Path(config.out, f"step-{step}")
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # what a run left that was killed while it saved
    dist.barrier()
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        Path(config.out, "latest.new").write_text(str(step))
        os.replace(Path(config.out, "latest.new"), Path(config.out, "latest"))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> int:
    """The steps that are done, with model and optimizer as they were; any number of ranks."""
    latest = Path(config.out, "latest")
    if not (config.resume and latest.exists()):
        return 0
    step = int(latest.read_text())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=Path(config.out, f"step-{step}"))
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **parts)
    return step


def train(config: Config) -> list[float]:
    """Trains, evaluates and saves; returns this rank's losses, one for each step that it made."""
    device = torch.device("cuda" if dist.get_backend() != "gloo" else "cpu")
    training, held_out = read_bytes(config.data)
    model = build(config, device)
    optimizer = make_optimizer(model, config)  # fullshard: after sharding
    first, losses = load(model, optimizer, config), []
    for step in range(first, config.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, config)
        total = 0.0
        for micro in range(config.accumulate):
            model.set_requires_gradient_sync(micro == config.accumulate - 1)  # fullshard
            seed = (config.seed, dist.get_rank(), step, micro)
            inputs, targets = windows(training, config, seed)
            scores = model(inputs.to(device)).float()
            loss = cross_entropy(scores.flatten(0, 1), targets.to(device).flatten())
            (loss / config.accumulate).backward()
            total += loss.detach() / config.accumulate
        clip_grad_norm_(model, config.clip)  # fullshard: one number over all ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
        if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
            value = evaluate(model, held_out, config, device)
            save(model, optimizer, step + 1, config)
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {losses[-1]:.3f}, held out {value:.3f}")
    weights = full_state_dict(model)  # whole tensors, on rank 0 alone
    if dist.get_rank() == 0:
        torch.save(weights, Path(config.out, "weights.pt"))
        Path(config.out, "config.json").write_text(json.dumps(asdict(config), indent=2))
    return losses


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Reads the options and trains; the process group is there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in asdict(Config()).items():
        if isinstance(value, bool):
            parser.add_argument(f"--{name}", action="store_true")
        else:
            option = f"--{name.replace('_', '-')}"
            parser.add_argument(option, type=type(value), default=value, help=f"({value})")
    config = Config(**vars(parser.parse_args(arguments)))
    if dist.get_rank() == 0:
        Path(config.out).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return train(config)


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
