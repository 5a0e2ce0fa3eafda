"""Text from a model, one token at a time."""

from __future__ import annotations

import torch
from torch import nn

from fullshard_train.errors import TrainError
from fullshard_train.hf.folder import open_folder
from fullshard_train.hf.model import read_config, vocabulary
from fullshard_train.hf.prompts import Coder
from fullshard_train.hf.tokens import choose_coder
from fullshard_train.seeds import generator_for
from fullshard_train.settings.config import Config
from fullshard_train.settings.sections import SampleConfig

__all__ = ["continue_text", "prompt_tokens"]


def prompt_tokens(coder: Coder, wanted: SampleConfig) -> list[int]:
    """The tokens of a prompt: as it is, or as a user's message after which an answer begins.

    Raises:
        TrainError: there is no chat template, or it refuses the message.
    """
    if not wanted.chat:
        return coder.encode(wanted.prompt)
    try:
        said = [{"role": "user", "content": wanted.prompt}]
        return coder.encode_rendered(coder.render(said, None, open=True))
    except TrainError as error:
        raise TrainError(f"config sample.chat = true: the prompt {error}") from error


@torch.no_grad()
def continue_text(config: Config, model: nn.Module, device: torch.device) -> str:
    """The configured prompt and what the model writes after it; it needs no documents.

    The model sees the last `hf.block` tokens. Drawing is on the CPU, from a generator of the seed,
    so every rank draws the same.

    Raises:
        TrainError: the model's folder is not what it was, or has no chat template.
    """
    wanted, folder = config.sample, open_folder(config.hf)
    coder = choose_coder(config.hf, folder, vocabulary(read_config(folder)))
    generator = generator_for(config.train.seed, "sample")
    tokens = prompt_tokens(coder, wanted)
    model.eval()
    for _ in range(wanted.length):
        seen = torch.tensor(tokens[-config.hf.block :])
        inputs = torch.stack((seen, torch.arange(len(seen))), dim=-1)
        logits = model(inputs[None].to(device))[0, -1].float().cpu()
        probability = torch.softmax(logits / wanted.temperature, dim=-1)
        tokens.append(int(torch.multinomial(probability, 1, generator=generator)))
    model.train()
    return coder.decode(tokens)
