"""The tasks there are, by the name that the config gives them.

Owns the choice. A new task is a module like `fullshard_train.text.task`, and a name here.
"""

from __future__ import annotations

import torch
from torch import nn

from fullshard_train.digits import task as digits
from fullshard_train.errors import TrainError
from fullshard_train.hf import model as hf_model
from fullshard_train.hf import sampling as hf_sampling
from fullshard_train.hf import task as hf_task
from fullshard_train.hf import weights as hf_weights
from fullshard_train.ranks.distributed import World
from fullshard_train.settings.config import Config
from fullshard_train.task import Task
from fullshard_train.text import task as text

__all__ = ["build_model", "continue_text", "fill_untrained", "layers_of", "load_task"]


def build_model(config: Config) -> nn.Module:
    """The unsharded model that a config describes; it needs no data."""
    if config.run.task == "digits":
        return digits.build_model(config)
    if config.run.task == "hf":
        return hf_model.build_model(config)
    return text.build_model(config)


def load_task(config: Config, world: World) -> Task:
    """The task of a config, with its data: rank 0 reads, every rank receives.

    Raises:
        TrainError: on every rank, when there are no data, or too few.
    """
    if config.run.task == "digits":
        return digits.load_task(config, world)
    if config.run.task == "hf":
        return hf_task.load_task(config, world)
    return text.load_task(config, world)


def layers_of(config: Config, model: nn.Module) -> list[nn.Module]:
    """The parts of a language model to shard each on its own, in forward order; it needs no data.

    Raises:
        TrainError: as `continue_text`.
    """
    _require_language(config)
    if isinstance(model, hf_model.Causal):
        return list(hf_model.layers_of(model))
    return text.layers(model)


def fill_untrained(config: Config, model: nn.Module) -> None:
    """Give a model that has memory what a checkpoint leaves out; every rank calls this.

    Raises:
        TrainError: as `continue_text`, or what a model of transformers began with is not there.
    """
    _require_language(config)
    if isinstance(model, hf_model.Causal):
        hf_weights.fill_untrained(model, config, config.train.seed)


def continue_text(config: Config, model: nn.Module, device: torch.device) -> str:
    """The prompt of a config and what a model writes after it; run it on every rank.

    Raises:
        TrainError: the task is not one of language.
    """
    _require_language(config)
    if config.run.task == "hf":
        return hf_sampling.continue_text(config, model, device)
    return text.continue_text(config, model, device)


def _require_language(config: Config) -> None:
    if config.run.task not in ("text", "hf"):
        raise TrainError(
            f"sample: takes runs of the tasks text and hf, and this one's is {config.run.task}"
        )
