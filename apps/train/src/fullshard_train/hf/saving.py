"""The folder that `from_pretrained` reads: weights, configuration, tokenizer; or adapters alone.

Owns the contents of the folder. Weights are written by all ranks, each out of its shards, in
bounded memory.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.checkpoint import Rule, SaveOptions, WeightsError, save_safetensors
from fullshard.sharding import RankMismatchError
from fullshard_train.errors import TrainError
from fullshard_train.hf.folder import DTYPES, ModelFolder, open_folder
from fullshard_train.hf.model import Causal
from fullshard_train.hf.weights import adapter_rules, base_rules, stored_names
from fullshard_train.settings.config import Config

__all__ = ["save_pretrained"]


def save_pretrained(model: Causal, root: Path, config: Config) -> None:
    """Write the model, or its adapters, into the folder `root`; every rank calls this.

    A process without a process group may call it too. Existing files are replaced.

    Raises:
        TrainError: it cannot be written.
    """
    section = config.hf
    folder = open_folder(section)
    adapted = section.method == "lora"
    try:
        if adapted:
            rules, stem, dtype = adapter_rules(), "adapter_model", None
        else:
            rules, stem, dtype = _base_rules(model, folder), "model", _saved_dtype(config, folder)
        save_safetensors(
            model,
            root,
            max_shard_size=section.max_shard_size,
            dtype=dtype,
            rename=rules,
            options=SaveOptions(stem=stem, metadata={"format": "pt"}),
        )
        if not dist.is_initialized() or dist.get_rank() == 0:
            _copy_companions(folder, root)
            _describe(model, root, folder, dtype)
    except (OSError, RankMismatchError, ValueError, WeightsError) as error:
        raise TrainError(f"export {root}: {error}") from error


def _base_rules(model: Causal, folder: ModelFolder) -> list[Rule]:
    stored = [] if folder.weights is None else stored_names(folder.weights)
    return base_rules(model, stored, adapted=False)


def _saved_dtype(config: Config, folder: ModelFolder) -> torch.dtype:
    name = config.hf.save_dtype
    return folder.stored if name == "auto" else DTYPES[name]


def _copy_companions(folder: ModelFolder, root: Path) -> None:
    for name in folder.companions():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder.root / name, root / name)


def _describe(model: Causal, root: Path, folder: ModelFolder, dtype: torch.dtype | None) -> None:
    """Write the configuration of the model, or of its adapters."""
    inner: Any = model.inner
    if dtype is None:
        adapters = inner.peft_config["default"]
        adapters.base_model_name_or_path = str(folder.root.resolve())
        adapters.inference_mode = True
        adapters.save_pretrained(root)
        return
    described = inner.config
    described.dtype = dtype
    described.architectures = [_plain_class(inner)]
    described.save_pretrained(root)


def _plain_class(model: Any) -> str:
    """The name of a model's class, without what sharding mixes into it."""
    kinds = (kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
    return next(kinds).__name__
