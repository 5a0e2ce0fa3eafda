"""Folders of DeepSpeed's ZeRO, stages 1 to 3: the float32 weights, put together from all ranks.

[Note: layout] A folder has a file ``latest``, which names a tag, and a folder of that name with two
kinds of files. ``*_model_states.pt`` has buffers, the shapes of parameters by optimizer group, tied
names and frozen parameters. ``*_optim_states.pt`` has one rank's part of the float32 copy.
Stages 1 and 2 join the parameters of a group into one vector, cut it into equal parts and give each
rank one part. Stage 3 cuts each parameter: rank r has elements r*n to (r+1)*n, with n the number of
elements over the number of ranks, rounded up; a rank's parts follow each other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullshard.cli.converting import unpickling
from fullshard.cli.converting.entry import Checkpoint, ConvertError, Entry, one_of_each

__all__ = ["is_zero", "open_zero"]

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


@dataclass(frozen=True)
class _Rank:
    """The float32 values of one rank: flat tensors, read by positions of elements."""

    flat: tuple[torch.Tensor, ...]

    @property
    def numel(self) -> int:
        return sum(each.numel() for each in self.flat)

    def part(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """Yield the pieces of elements ``start`` to ``stop``."""
        begin = 0
        for each in self.flat:
            low, high = max(start - begin, 0), min(stop - begin, each.numel())
            if low < high:
                yield each[low:high]
            begin += each.numel()


def is_zero(path: Path) -> bool:
    """Return whether ``path`` is a folder of ZeRO, or the folder of a tag."""
    return path.is_dir() and (_tagged(path) is not None)


def _tagged(path: Path) -> Path | None:
    latest = path / "latest"
    folder = path / latest.read_text().strip() if latest.is_file() else path
    return folder if any(folder.glob("*_optim_states.pt")) else None


def open_zero(path: Path) -> Checkpoint:
    """Return the float32 weights, buffers and frozen parameters of the model.

    Raises:
        ConvertError: if a rank's file is missing, or the files are not those of ZeRO.
    """
    folder = _tagged(path)
    assert folder is not None, "the caller asked"
    files = sorted(folder.glob("*_optim_states.pt"), key=_order)
    if any(int(match[2]) for match in map(_numbers, files) if match):
        raise ConvertError(f"{folder} has tensor parallel ranks (mp_rank_01), which are not merged")
    try:
        ranks = [_load(file)["optimizer_state_dict"] for file in files]
        stage, count = int(_first(ranks[0]["zero_stage"])), int(_first(ranks[0]["partition_count"]))
        if len(files) != count:
            raise ConvertError(f"{folder} has {len(files)} of {count} ranks' files; copy all files")
        states = [_load(file) for file in sorted(folder.glob("*_model_states.pt"), key=_order)]
        shapes = [dict(each) for each in states[0]["param_shapes"]]
        if stage == 3:
            flats = [_Rank(tuple(_flat(rank["fp32_flat_groups"]))) for rank in ranks]
            trained = list(_by_parameter(flats, {k: v for each in shapes for k, v in each.items()}))
        else:
            groups = [rank["single_partition_of_fp32_groups"] for rank in ranks]
            trained = [
                each
                for number, named in enumerate(shapes)
                for each in _by_group([group[number] for group in groups], named, number)
            ]
        entries = [*_whole(states, stage), *trained]
        entries += _tied(entries, states[0].get("shared_params"))
    except (KeyError, IndexError, TypeError, AttributeError, OSError, RuntimeError) as error:
        raise ConvertError(
            f"{folder} is no ZeRO checkpoint that is known here: {type(error).__name__}: {error}; "
            "DeepSpeed's zero_to_fp32.py in that folder may read it"
        ) from error
    rest = [name for name in ranks[0] if "fp32" not in name]
    return Checkpoint(
        path=path,
        format="deepspeed",
        entries=one_of_each(entries, path),
        left_out=tuple(map(str, rest)),
    )


def _numbers(file: Path) -> re.Match[str] | None:
    return _RANK.search(file.name)


def _order(file: Path) -> tuple[int, str]:
    match = _numbers(file)
    return (int(match[1]) if match else 0, file.name)


def _load(file: Path) -> Any:
    try:
        return torch.load(
            file, map_location="cpu", mmap=True, weights_only=False, pickle_module=unpickling
        )
    except Exception as error:
        raise ConvertError(f"{file} cannot be read: {error}") from error


def _first(value: Any) -> Any:
    """Return the value, or the largest of a list: one number per optimizer group."""
    if isinstance(value, unpickling.Unknown):
        raise TypeError("the stage is an object of DeepSpeed")
    return max(value) if isinstance(value, list | tuple) else value


def _flat(groups: Any) -> Sequence[torch.Tensor]:
    return [groups] if isinstance(groups, torch.Tensor) else list(groups)


def _float32(name: str, shape: Any, read: Callable[[], torch.Tensor]) -> Entry:
    return Entry(name=name, shape=tuple(shape), dtype=torch.float32, read=read)


def _joined(pieces: Iterator[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([each.reshape(-1).float() for each in pieces] or [torch.empty(0)]).view(shape)


def _by_parameter(ranks: Sequence[_Rank], shapes: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield parameters that are cut one by one: stage 3."""
    at = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        part = -(-numel // len(ranks))

        def read(at: int = at, part: int = part, numel: int = numel, shape: Any = shape) -> Any:
            pieces = itertools.chain.from_iterable(
                rank.part(at, at + min(part, max(numel - index * part, 0)))
                for index, rank in enumerate(ranks)
            )
            return _joined(pieces, tuple(shape))

        yield _float32(name, shape, read)
        at += part
    _require_room(at, min(rank.numel for rank in ranks), "each rank")


def _by_group(parts: Sequence[torch.Tensor], shapes: Mapping[str, Any], number: int) -> list[Entry]:
    """Return the parameters of a group that is cut as one vector: stages 1 and 2."""
    whole, at, entries = _Rank(tuple(each.reshape(-1) for each in parts)), 0, []
    for name, shape in shapes.items():
        stop = at + math.prod(shape)
        entries.append(_float32(name, shape, partial(_range, whole, at, stop, tuple(shape))))
        at = stop
    _require_room(at, whole.numel, f"group {number}")
    return entries


def _range(whole: _Rank, start: int, stop: int, shape: tuple[int, ...]) -> torch.Tensor:
    return _joined(whole.part(start, stop), shape)


def _require_room(needed: int, there: int, where: str) -> None:
    if needed > there:
        raise ConvertError(f"{where} has {there} elements, and its parameters need {needed}")


def _whole(states: Sequence[Mapping[str, Any]], stage: int) -> Iterator[Entry]:
    """Yield buffers and frozen parameters."""
    first = states[0]
    for name in first["buffer_names"]:
        tensor = first["module"][name]
        yield Entry(
            name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, read=partial(_same, tensor)
        )
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        of = states if stage == 3 else states[:1]
        parts = [state["frozen_param_fragments"][name].reshape(-1) for state in of]
        whole = _Rank(tuple(parts))
        yield Entry(
            name=name,
            shape=tuple(shape),
            dtype=torch.float32,
            read=partial(_range, whole, 0, math.prod(shape), tuple(shape)),
        )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _tied(entries: Sequence[Entry], shared: Any) -> list[Entry]:
    """Return the second names of tied parameters."""
    pairs = shared.items() if isinstance(shared, Mapping) else (shared or ())
    by_name = {each.name: each for each in entries}
    return [
        replace(by_name[original], name=other)
        for other, original in pairs
        if original in by_name and other not in by_name
    ]
