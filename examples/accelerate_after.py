"""``accelerate_before.py`` without Accelerate: the same losses, and every line is the script's own.

::

    torchrun --standalone --nproc-per-node=2 accelerate_after.py

Comments say what each line was.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fullshard.optim import clip_grad_norm_
from fullshard.policies import ClassWrap, MixedPrecisionPolicy, wrap

ACCUMULATE = 2  # was: gradient_accumulation_steps


class Block(nn.Module):
    """Two layers, and what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] to the same."""
        return x + self.down(torch.relu(self.up(x)))


def main(folder: str = "checkpoint") -> list[float]:
    """Trains and saves; returns this rank's losses. The process group is there."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(16) for _ in range(3)], nn.Linear(16, 4))
    # was: mixed_precision="bf16"; Accelerate's is bfloat16 in gathers, computation and reductions
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.bfloat16
    )
    # was: auto_wrap_policy, transformer_cls_names_to_wrap, reshard_after_forward, prepare(model)
    wrap(model, ClassWrap(Block), mp_policy=precision, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after sharding: no prepare()
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :4].square())
    # was: prepare(loader), which gives rank r every N-th batch
    sampler = DistributedSampler(range(len(data) // 8), shuffle=False)
    batches = [list(range(8 * number, 8 * number + 8)) for number in sampler]
    loader = DataLoader(data, batch_sampler=batches)
    losses = []
    for number, (inputs, targets) in enumerate(loader, start=1):
        is_last = number % ACCUMULATE == 0 or number == len(loader)
        model.set_requires_gradient_sync(is_last)  # was: accumulate(model)
        inputs, targets = inputs.to(_device()), targets.to(_device())
        loss = mse_loss(model(inputs).float(), targets)
        (loss / ACCUMULATE).backward()  # was: accelerator.backward(loss)
        if is_last:
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    model_state, optimizer_state = get_state_dict(model, optimizer)  # was: save_state
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return losses


def _device() -> str:
    return "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    main()
    dist.destroy_process_group()
