"""Files of ``torch.save``: a full state dict, alone or inside a dict, as FSDP1 scripts save it.

Files are mapped into memory, so a tensor is read from the disk when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.cli.converting.entry import (
    Checkpoint,
    ConvertError,
    Entry,
    chosen_group,
    one_of_each,
)

__all__ = ["SUFFIXES", "open_torch_file", "write_torch_file"]

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_USUAL = ("model", "state_dict", "model_state_dict", "module")


def open_torch_file(path: Path, key: str | None) -> Checkpoint:
    """Return the tensors of a state dict.

    Raises:
        ConvertError: if the file has no plain state dict.
    """
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise ConvertError(f"{path} cannot be read as a state dict: {error}") from error
    if not isinstance(state, Mapping):
        raise ConvertError(f"{path} has a {type(state).__name__}; pass a file with a state dict")
    leaves = list(_leaves(state, ()))
    tensors = {where: value for where, value in leaves if isinstance(value, torch.Tensor)}
    group = chosen_group((where[:-1] for where in tensors), key, _USUAL, path)
    inside = {where[-1]: value for where, value in tensors.items() if where[:-1] == group}
    if any(name.rpartition(".")[2] in ("flat_param", "_flat_param") for name in inside):
        raise ConvertError(
            f"{path} has flat parameters of one rank (FSDP1's LOCAL_STATE_DICT), without their "
            "shapes; save with FULL_STATE_DICT or SHARDED_STATE_DICT"
        )
    if sharded := [name for name, value in inside.items() if isinstance(value, DTensor)]:
        raise ConvertError(f"{path} has one rank's shard of {sharded[0]}; save with dcp.save")
    entries = [
        Entry(name=name, shape=tuple(each.shape), dtype=each.dtype, read=partial(_same, each))
        for name, each in inside.items()
    ]
    return Checkpoint(
        path=path,
        format="torch",
        entries=one_of_each(entries, path),
        left_out=tuple(".".join(where) for where, _ in leaves if where[:-1] != group),
    )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _leaves(
    state: Mapping[Any, Any], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in state.items():
        where = (*above, str(name))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, where)
        else:
            yield where, value


def write_torch_file(entries: Sequence[Entry], path: Path) -> list[str]:
    """Write a state dict, which must fit into memory as a whole; return the names of the files."""
    state = {each.name: each.read().clone() for each in entries}
    torch.save(state, path)
    return [path.name.removesuffix(".partial")]
