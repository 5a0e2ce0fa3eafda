"""Text from a model, one token at a time."""

from __future__ import annotations

import torch
from torch import nn

from fullshard_train.hf.folder import open_folder
from fullshard_train.hf.model import read_config, vocabulary
from fullshard_train.hf.tokens import choose_coder
from fullshard_train.seeds import generator_for
from fullshard_train.settings.config import Config

__all__ = ["continue_text"]


@torch.no_grad()
def continue_text(config: Config, model: nn.Module, device: torch.device) -> str:
    """The configured prompt and what the model writes after it; it needs no documents.

    The model sees the last `hf.block` tokens. Drawing is on the CPU, from a generator of the seed,
    so every rank draws the same.

    Raises:
        TrainError: the model's folder is not what it was.
    """
    wanted, folder = config.sample, open_folder(config.hf)
    coder = choose_coder(config.hf, folder, vocabulary(read_config(folder)))
    generator = generator_for(config.train.seed, "sample")
    tokens = coder.encode(wanted.prompt)
    model.eval()
    for _ in range(wanted.length):
        seen = torch.tensor(tokens[-config.hf.block :])
        inputs = torch.stack((seen, torch.arange(len(seen))), dim=-1)
        logits = model(inputs[None].to(device))[0, -1].float().cpu()
        probability = torch.softmax(logits / wanted.temperature, dim=-1)
        tokens.append(int(torch.multinomial(probability, 1, generator=generator)))
    model.train()
    return coder.decode(tokens)
