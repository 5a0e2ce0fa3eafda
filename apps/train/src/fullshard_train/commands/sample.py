"""`fullshard_train sample`: text from a checkpoint, on one process or on any number of ranks.

Owns the command. A single process needs no process group and holds the whole model; under torchrun
the model is sharded over the ranks, whatever number of them wrote the checkpoint. With one seed,
both draw from equal predictions, up to rounding.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fullshard_train.checkpoints.checkpoint import (
    load_shards,
    load_weights,
    read_position,
    resolve,
)
from fullshard_train.ranks.distributed import (
    World,
    choose_device,
    init_mesh,
    on_main,
)
from fullshard_train.settings.config import Config, default_table, load_config, merge
from fullshard_train.tasks import build_model, continue_text, fill_untrained, layers_of
from fullshard_train.training.sharded import shard_model

__all__ = ["add_options", "sample"]

_SETTINGS = {
    "prompt": "sample.prompt",
    "chat": "sample.chat",
    "length": "sample.length",
    "temperature": "sample.temperature",
    "seed": "train.seed",
    "device": "parallel.device",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's arguments: those that are left out are as in the run."""
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's folder: its newest")
    for option, setting in _SETTINGS.items():
        parser.add_argument(
            f"--{option}",
            metavar="VALUE",
            help="where to compute (default: auto)"
            if option == "device"
            else f"instead of the run's {setting}",
        )


@dataclass(frozen=True, slots=True)
class _Wanted:
    checkpoint: Path
    config: Config


def sample(parser: argparse.ArgumentParser, words: list[str], world: World | None) -> str | None:
    """The prompt and what the model writes after it; None on ranks other than 0.

    Without a world there is one process, and no process group.

    Raises:
        TrainError: on every rank: a wrong option, no checkpoint, or a task that writes no text.
    """
    if world is None:
        return _alone(_wanted(parser, words))
    return _sharded(world, on_main(lambda: _wanted(parser, words)))


def _wanted(parser: argparse.ArgumentParser, words: list[str]) -> _Wanted:
    options = parser.parse_args(words)
    checkpoint = resolve(options.checkpoint)
    base = merge(default_table(), read_position(checkpoint).config)
    given = {name: getattr(options, name) for name in _SETTINGS}
    given["device"] = given["device"] or "auto"
    overrides = [f"{_SETTINGS[name]}={value}" for name, value in given.items() if value is not None]
    config = load_config([], overrides, base=base)
    return _Wanted(checkpoint, replace(config, parallel=replace(config.parallel, mesh=0)))


def _alone(wanted: _Wanted) -> str:
    world = World(rank=0, size=1, local_rank=0, local_size=1)
    device = choose_device(wanted.config, world)
    model = build_model(wanted.config)
    fill_untrained(wanted.config, model)
    load_weights(wanted.checkpoint, model)
    return continue_text(wanted.config, model.to(device), device)


@dataclass(frozen=True, slots=True)
class _Layers:
    config: Config

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return layers_of(self.config, model)


def _sharded(world: World, wanted: _Wanted) -> str | None:
    config = wanted.config
    device = choose_device(config, world)
    with torch.device("meta"):
        model = build_model(config)
    shard_model(model, _Layers(config), config, init_mesh(world, device), device)
    model.to_empty(device=device)
    fill_untrained(config, model)
    load_shards(wanted.checkpoint, world, model)
    text = continue_text(config, model, device)
    return text if world.is_main else None
