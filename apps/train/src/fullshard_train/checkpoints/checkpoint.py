"""The contents of a checkpoint: model, optimizer and a JSON file with the progress of the run.

Owns the contents; `fullshard_train.checkpoints.store` owns the folder,
`fullshard_train.checkpoints.saving` the moment.
Tensors go through `torch.distributed.checkpoint`. There is no generator state to save: every random
stream of a run is a function of its seed and the step (see `fullshard_train.seeds`), and both are
in the JSON file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from fullshard.checkpoint import SaveError
from fullshard_train.checkpoints.store import CheckpointStore, checksum, verify
from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import World, on_main, raise_together

__all__ = [
    "Position",
    "begin_checkpoint",
    "capture",
    "commit_checkpoint",
    "load_checkpoint",
    "load_shards",
    "load_weights",
    "put",
    "read_position",
    "resolve",
]

_POSITION = "position.json"
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a run had come: the JSON file of a checkpoint.

    `config` is the run's nested table; `fingerprint` is the task's.
    """

    step: int
    config: dict[str, Any]
    fingerprint: str
    world_size: int
    torch_version: str


def capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the contents of a checkpoint for `torch.distributed.checkpoint`: shards of this rank.

    Frozen parameters are not: they are what the task began with.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_TRAINED)
    return {"model": model_state, "optimizer": optimizer_state}


def begin_checkpoint(store: CheckpointStore, step: int) -> Path:
    """The folder to write the checkpoint after `step` updates into; every rank calls this.

    Raises:
        TrainError: on every rank, when it cannot be made.
    """
    return on_main(lambda: _guarded(step, lambda: store.begin(step)))


def commit_checkpoint(
    store: CheckpointStore,
    world: World,
    position: Position,
    write: Callable[[], object],
    *,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Make the folder of `begin_checkpoint` a checkpoint, and return where it is.

    Every rank calls this, in any thread.

    Args:
        store: where.
        world: the ranks.
        position: how far the run had come.
        write: writes what was captured into the folder, or waits until it is written.
        group: all ranks; no other thread may use the process group during the save.

    Raises:
        TrainError: on every rank, when it cannot be written; earlier checkpoints are untouched.
    """
    step = position.step
    folder = store.unfinished(step)

    def complete() -> dict[str, int]:
        write()
        # One rank's files are read back by that rank; rank 0 answers for the two that belong to
        # all.
        names = [path.name for path in sorted(folder.glob(f"__{world.rank}_*"))]
        if world.is_main:
            _write_position(folder / _POSITION, position)
            names += [".metadata", _POSITION]
        return {name: checksum(folder / name) for name in names}

    checksums = raise_together(lambda: _guarded(step, complete), group=group)
    gathered: list[dict[str, int] | None] = [None] * world.size
    dist.all_gather_object(gathered, checksums, group=group)
    everything = {name: value for part in gathered if part for name, value in part.items()}
    return on_main(lambda: _guarded(step, lambda: store.commit(step, everything)), group=group)


def resolve(path: Path) -> Path:
    """The checkpoint that `path` means.

    The path is `path` itself, or the newest checkpoint in a run's folder or in its checkpoints
    folder.

    Raises:
        TrainError: there is none.
    """
    if (path / _POSITION).is_file():
        return path
    for root in (path / "checkpoints", path):
        found = CheckpointStore(root).latest()
        if found is not None:
            return found
    raise TrainError(
        f"resume {path}: no checkpoint there; give a run's folder or one checkpoint of it"
    )


def read_position(checkpoint: Path) -> Position:
    """The JSON file of a checkpoint.

    Raises:
        TrainError: it cannot be read.
    """
    try:
        table = json.loads((checkpoint / _POSITION).read_text(encoding="utf-8"))
        return Position(**table)
    except (OSError, ValueError, TypeError) as error:
        raise TrainError(f"checkpoint {checkpoint}: {_POSITION} cannot be read: {error}") from error


def load_checkpoint(
    checkpoint: Path, world: World, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Fill `model` and `optimizer` from a checkpoint, written by a world of any size.

    Every rank calls this.

    Raises:
        TrainError: on every rank, when it is damaged or does not fit the model.
    """
    raise_together(lambda: verify(checkpoint, part=world.rank, parts=world.size))

    def read() -> None:
        state = capture(model, optimizer)
        try:
            load(state, checkpoint_id=checkpoint)
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            raise _not_loaded(checkpoint, error) from error
        put(model, optimizer, state)

    raise_together(read)


def put(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take over a state that was loaded into what `capture` gave."""
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_TRAINED,
    )


def load_shards(checkpoint: Path, world: World, model: nn.Module) -> None:
    """Fill a sharded `model` from a checkpoint, written by a world of any size, without optimizer.

    Every rank calls this.

    Raises:
        TrainError: on every rank, when it is damaged or does not fit the model.
    """
    raise_together(lambda: verify(checkpoint, part=world.rank, parts=world.size))

    def read() -> None:
        state = {"model": _trained(model)}
        try:
            load(state, checkpoint_id=checkpoint)
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            raise _not_loaded(checkpoint, error) from error
        _take(model, state["model"])

    raise_together(read)


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Fill what an unsharded `model` trains from a checkpoint, in this process alone.

    Raises:
        TrainError: the checkpoint is damaged or does not fit the model.
    """
    verify(checkpoint)
    state = {"model": _trained(model)}
    try:
        with warnings.catch_warnings():
            # A single process reads the checkpoint on purpose.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(state, checkpoint_id=checkpoint, no_dist=True)
    except (Exception, CheckpointException) as error:
        raise _not_loaded(checkpoint, error) from error
    _take(model, state["model"])


def _trained(model: nn.Module) -> dict[str, Any]:
    """The state dict of `model` without frozen parameters, which a checkpoint does not have."""
    named = model.named_parameters(remove_duplicate=False)  # a tied one has several names
    frozen = {name for name, each in named if not each.requires_grad}
    return {name: each for name, each in model.state_dict().items() if name not in frozen}


def _take(model: nn.Module, state: dict[str, Any]) -> None:
    left = model.load_state_dict(state, strict=False).missing_keys
    assert not set(left) & _trained(model).keys(), left


def _not_loaded(checkpoint: Path, error: BaseException) -> TrainError:
    # Unpickling and planners raise many types; the cure for the user is always to choose another
    # checkpoint.
    return TrainError(f"checkpoint {checkpoint} cannot be loaded: {_first_line(error)}")


def _write_position(path: Path, position: Position) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(position), file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _guarded(step: int, write: Callable[[], T]) -> T:
    try:
        return write()
    except (OSError, SaveError) as error:
        reason = error.reason if isinstance(error, SaveError) else _first_line(error)
        raise TrainError(f"the checkpoint after step {step} cannot be written: {reason}") from error


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        # torch's own text is a traceback per rank.
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {_first_line(cause)}"
    return f"{type(error).__name__}: {error}".splitlines()[0]
