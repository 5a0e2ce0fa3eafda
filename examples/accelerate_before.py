"""A training script for Accelerate with its FSDP plugin: what ``accelerate_after.py`` began as.

``accelerate launch --use_fsdp accelerate_before.py`` runs it on torch's own FSDP2. The script runs on fullshard without changes, too: ``torchrun ... -m fullshard.wrappers.install accelerate_before.py``.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """Two layers, and what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] to the same."""
        return x + self.down(torch.relu(self.up(x)))


def main(folder: str = "checkpoint") -> list[float]:
    """Trains and saves; returns this rank's losses."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
    )
    accelerator = Accelerator(
        mixed_precision="bf16", fsdp_plugin=plugin, gradient_accumulation_steps=2
    )
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(16) for _ in range(3)], nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs[:, :4].square()), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = mse_loss(model(inputs).float(), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(folder)
    return losses


if __name__ == "__main__":
    main()
