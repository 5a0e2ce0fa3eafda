"""The full weights of a model in one safetensors file, and back into the unsharded model.

Owns that file: the parameters and buffers under the unsharded model's names, each once (a tied
weight under its first name), and in its metadata the run's config, so that the file alone is enough
to build the model. A file is read back and compared before it gets its name.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from fullshard.sharding import full_state_dict
from fullshard_train.checkpoints.checkpoint import load_weights, read_position, resolve
from fullshard_train.errors import TrainError
from fullshard_train.hf.model import Causal
from fullshard_train.hf.saving import save_pretrained
from fullshard_train.ranks.distributed import on_main
from fullshard_train.settings.config import Config, default_table, merge
from fullshard_train.tasks import build_model

__all__ = ["export_checkpoint", "export_model", "export_weights", "load_exported"]

_METADATA = "fullshard_train"


def export_model(path: Path, model: nn.Module, config: Config) -> None:
    """Write the weights of a run's model, on every rank's call: a file, or a folder for "hf".

    Raises:
        TrainError: on every rank, if they cannot be written.
    """
    if isinstance(model, Causal):
        save_pretrained(model, path, config)
        return
    weights = full_state_dict(model)
    on_main(lambda: export_weights(path, weights, config))


def export_weights(path: Path, weights: Mapping[str, torch.Tensor], config: Config) -> None:
    """Write full weights, on the CPU, to `path`, in one piece.

    Args:
        path: a file, which is replaced, or made together with its folder.
        weights: what the state dict of the unsharded model has; a tied weight may come twice.
        config: of the run.

    Raises:
        TrainError: it cannot be written, or does not read back equal.
    """
    with torch.device("meta"):
        names = _names(build_model(config))
    once = {name: weights[name].contiguous() for name in names}
    metadata = {"format": "pt", _METADATA: json.dumps({"config": config.to_table()})}
    temporary = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(once, temporary, metadata=metadata)
        temporary.chmod(_mode_of_new_files(path.parent))  # safetensors keeps a file to its owner
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        restored = load_exported(temporary).state_dict()
        for name, weight in once.items():
            if not torch.equal(restored[name], weight):
                raise TrainError(f"export {path}: {name} does not read back as it was written")
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise TrainError(f"export {path}: {error}") from error


def _mode_of_new_files(folder: Path) -> int:
    """The permissions that a file gets here by default."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        probe = Path(name, "probe")
        probe.touch()
        return stat.S_IMODE(probe.stat().st_mode)


def export_checkpoint(source: Path, path: Path) -> Path:
    """Write the weights of a checkpoint to `path`; return which checkpoint it was.

    A single process is enough, for any number of ranks that wrote the checkpoint.

    Args:
        source: a checkpoint, or a run's folder, which means its newest one.
        path: a file that is not there yet; for the task "hf", a folder.

    Raises:
        TrainError: the checkpoint cannot be read, or the file is there or cannot be written.
    """
    if path.exists():
        raise TrainError(f"export {path}: is there already, and nothing is overwritten")
    checkpoint = resolve(source)
    table = merge(default_table(), read_position(checkpoint).config)
    config = Config.from_table(table)
    with torch.device("meta"):
        model = build_model(config)
    model.to_empty(device="cpu")
    load_weights(checkpoint, model)
    if isinstance(model, Causal):
        save_pretrained(model, path, config)
    else:
        export_weights(path, model.state_dict(), config)
    return checkpoint


def load_exported(path: Path) -> nn.Module:
    """The unsharded model of a file that `export_weights` wrote, on the CPU.

    Raises:
        TrainError: the file is not such a one.
        OSError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        metadata: Mapping[str, str] = file.metadata() or {}
        if _METADATA not in metadata:
            raise TrainError(f"weights {path}: not exported by this trainer: no config in it")
        table: Mapping[str, Any] = json.loads(metadata[_METADATA])["config"]
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    model = build_model(Config.from_table(merge(default_table(), table)))
    names = _names(model)
    if names != sorted(weights):
        odd = sorted(set(names).symmetric_difference(weights))
        raise TrainError(f"weights {path}: do not fit the model of their config: {', '.join(odd)}")
    model.load_state_dict(weights, strict=False)  # tied weights are filled through their first name
    return model


def _names(model: nn.Module) -> list[str]:
    """The names of parameters and persistent buffers, sorted, each tensor once."""
    kept = model.state_dict().keys()
    named = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return sorted(name for name in named if name in kept)
