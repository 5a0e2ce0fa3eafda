"""Text from a model, one byte at a time."""

from __future__ import annotations

import torch
from torch import nn

from fullshard_train.settings.sections import SampleConfig

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    config: SampleConfig,
    *,
    context: int,
    generator: torch.Generator,
    device: torch.device,
) -> bytes:
    """`prompt` and `config.length` bytes drawn after it.

    A byte is drawn from the model's prediction, with logits divided by `config.temperature`. The
    model sees the last `context` bytes. Drawing is on the CPU, so that every rank with a generator
    of one seed draws equal bytes; the number of forwards never depends on what is drawn.
    """
    data = list(prompt)
    model.eval()
    for _ in range(config.length):
        window = torch.tensor([data[-context:]], device=device)
        logits = model(window)[0, -1].float().cpu()
        probability = torch.softmax(logits / config.temperature, dim=-1)
        data.append(int(torch.multinomial(probability, 1, generator=generator)))
    model.train()
    return bytes(data)
