"""Files of ``torch.save``: a full state dict, alone or inside a dict, as FSDP1 scripts save it.

Files are mapped into memory, so a tensor is read from the disk when it is used. Files in the format
before torch 1.6 are read as a whole.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
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
    state = _load(path)
    if not isinstance(state, Mapping):
        raise ConvertError(f"{path} has a {type(state).__name__}; pass a file with a state dict")
    leaves = list(_leaves(state, ()))
    tensors = [(where, value) for where, value in leaves if isinstance(value, torch.Tensor)]
    group = chosen_group((where[:-1] for where, _ in tensors), key, _USUAL, path)
    inside = [(where[-1], value) for where, value in tensors if where[:-1] == group]
    if any(name.rpartition(".")[2] in ("flat_param", "_flat_param") for name, _ in inside):
        raise ConvertError(
            f"{path} has flat parameters of one rank (FSDP1's LOCAL_STATE_DICT), without their "
            "shapes; save with FULL_STATE_DICT or SHARDED_STATE_DICT"
        )
    if sharded := [name for name, value in inside if isinstance(value, DTensor)]:
        raise ConvertError(f"{path} has one rank's shard of {sharded[0]}; save with dcp.save")
    entries = [_entry(name, value, path) for name, value in inside]
    return Checkpoint(
        path=path,
        format="torch",
        entries=one_of_each(entries, path),
        left_out=tuple(
            ".".join(where)
            for where, value in leaves
            if where[:-1] != group or not isinstance(value, torch.Tensor)
        ),
    )


def _load(path: Path) -> Any:
    try:
        # only files of today's format, which are zip files, can be mapped
        mapped = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            # of sparse tensors, which are refused below; torch 2.11 and 2.15 word it differently
            warnings.filterwarnings("ignore", "Validating sparse tensor|Sparse invariant checks")
            return torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except Exception as error:
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise ConvertError(
                f"{path} has an object of {named[1]}, and only tensors and plain values are loaded;"
                " save a state dict, as torch.save(model.state_dict(), path) does"
            ) from error
        reason = re.split(r"\n|\. ", str(error))[0]
        raise ConvertError(
            f"{path} is cut short, or is no file of torch.save ({type(error).__name__}: {reason}); "
            "copy the file again"
        ) from error


def _entry(name: str, tensor: torch.Tensor, path: Path) -> Entry:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else "sparse"
        raise ConvertError(f"{path} has a {kind} tensor, {name}; save it as a dense tensor")

    def read() -> torch.Tensor:
        return tensor.detach().resolve_conj().resolve_neg()

    return Entry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, read=read)


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
    """Write a state dict, all of whose tensors must fit into memory; return the file's name.

    Raises:
        OSError, RuntimeError: if the file cannot be written; see ``write_error``.
    """
    state = {each.name: each.read().clone() for each in entries}
    with path.open("wb") as file:  # an error of a file that torch opens has no cause
        torch.save(state, file)
    return [path.name]
