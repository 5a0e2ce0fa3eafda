"""Files that are damaged, or not there: an error on every rank, and the model as it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

from checkpoint.saved import saved_for_all
from fullshard.checkpoint import (
    LoadOptions,
    SaveOptions,
    WeightsError,
    load_safetensors,
    save_safetensors,
)
from fullshard.checkpoint.files.headers import header_bytes, read_header
from fullshard.sharding import RankMismatchError, fully_shard, unsharded
from support.ranks import cpu_mesh, distributed
from support.weights import saved, values_of

STATE = {"weight": torch.ones(4, 3), "bias": torch.ones(4)}


def _changed(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change what is in the one file."""

    def write(folder: Path) -> None:
        file = saved(folder, STATE) / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return write


def _two_files(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Change a set of two files and an index."""

    def write(folder: Path) -> None:
        change(saved(folder, STATE, files=2))

    return write


def _with_header(header: str, nbytes: int) -> Callable[[Path], None]:
    """Write a file of this header and so many bytes of data."""

    def write(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        content = len(header).to_bytes(8, "little") + header.encode() + b"\0" * nbytes
        (folder / "model.safetensors").write_bytes(content)

    return write


_a_hole = _with_header('{"weight":{"dtype":"F32","shape":[4,3],"data_offsets":[4,52]}}', 52)


_cut_short = _changed(lambda content: content[:-1])
_cut_in_the_header = _changed(lambda content: content[:40])
_no_safetensors = _changed(lambda _: b"\x10" + b"\0" * 7 + b"pickled weights!" * 9)
INDEX = "model.safetensors.index.json"


def _name_another_file(folder: Path) -> None:
    told = json.loads((folder / INDEX).read_text())
    told["weight_map"]["extra"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(told))


def _leave_the_folder(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"weight": "../other.safetensors"}}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short; copy it again|is cut short, or has too much": _cut_short,
    "its header has": _cut_in_the_header,
    "has 0 bytes": _changed(lambda _: b""),
    "no header as safetensors files have": _no_safetensors,
    "or has too much": _changed(lambda content: content + b"more"),
    "belongs to no tensor": _a_hole,
    "names a twice": _with_header(
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        4,
    ),
    r"is F32 of shape \(4, 4\) in 48 bytes": _with_header(
        '{"weight":{"dtype":"F32","shape":[4,4],"data_offsets":[0,48]}}', 48
    ),
    "weight is F4 in": _with_header(
        '{"weight":{"dtype":"F4","shape":[4,3],"data_offsets":[0,6]},'
        '"bias":{"dtype":"F32","shape":[4],"data_offsets":[6,22]}}',
        22,
    ),
    "weight is I8 in": lambda folder: saved(folder, {**STATE, "weight": torch.ones(4, 3).char()}),
    "holds no safetensors file": lambda folder: folder.mkdir(exist_ok=True),
    "bring the index": _two_files(lambda folder: (folder / INDEX).unlink()),
    "names model-00002-of-00002.safetensors, which are missing": _two_files(
        lambda folder: (folder / "model-00002-of-00002.safetensors").unlink()
    ),
    "says that model-00001-of-00002.safetensors holds extra": _two_files(_name_another_file),
    "which is not a file beside it": _two_files(_leave_the_folder),
    "is no index of safetensors files": _two_files(
        lambda folder: (folder / INDEX).write_text("[]")
    ),
}


@pytest.mark.parametrize("words", DAMAGES)
@distributed(2)
def test_damaged_files_raise_on_every_rank_and_the_model_is_as_it_was(
    words: str, tmp_path: Path
) -> None:
    if dist.get_rank() == 0:
        DAMAGES[words](tmp_path / "set")
    dist.barrier()
    for meta in (False, True):
        with torch.device("meta" if meta else "cpu"):
            model = fully_shard(nn.Linear(3, 4))
        before = None if meta else values_of(model)["weight"].clone()
        with pytest.raises(WeightsError, match=words):
            load_safetensors(model, tmp_path / "set")
        if before is None:
            assert model.weight.is_meta
        else:
            assert torch.equal(values_of(model)["weight"], before)


@pytest.mark.parametrize("damage", [_cut_short, _cut_in_the_header, _a_hole, _no_safetensors])
def test_what_we_refuse_the_safetensors_library_refuses_too(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    damage(tmp_path)
    with pytest.raises(Exception, match=r"."), safe_open(tmp_path / "model.safetensors", "pt"):
        pass


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="does not exist"):
        load_safetensors(nn.Linear(3, 4), tmp_path / "nowhere")


def test_an_index_may_be_passed_and_a_lone_file_of_any_name(tmp_path: Path) -> None:
    index = saved(tmp_path / "a", STATE, files=2) / "model.safetensors.index.json"
    load_safetensors(nn.Linear(3, 4), index)
    saved(tmp_path / "b", STATE)
    os.rename(tmp_path / "b" / "model.safetensors", tmp_path / "b" / "pytorch.safetensors")
    load_safetensors(nn.Linear(3, 4), tmp_path / "b")


@distributed(2)
def test_ranks_that_see_other_files_raise_instead_of_waiting(tmp_path: Path) -> None:
    rank = dist.get_rank()
    state = STATE if rank == 0 else {"weight": torch.ones(4, 3), "bias": torch.ones(5)}
    saved(tmp_path / str(rank), state)
    model = fully_shard(nn.Linear(3, 4))
    kind: type[Exception] = RankMismatchError if rank == 0 else WeightsError
    with pytest.raises(kind, match=r"bias has shape \(5,\)"):
        load_safetensors(model, tmp_path / str(rank))
    half = {name: value.bfloat16() for name, value in STATE.items()}
    saved(tmp_path / f"b{rank}", STATE if rank == 0 else half)
    with pytest.raises(RankMismatchError, match=r"weight from weight F32.* BF16"):
        load_safetensors(model, tmp_path / f"b{rank}")


@pytest.mark.parametrize("dim", [0, 1])
@distributed(2)
def test_a_file_that_fails_while_it_is_read_raises_on_every_rank(dim: int, tmp_path: Path) -> None:
    rank = dist.get_rank()
    saved_for_all(tmp_path, {"weight": torch.ones(64, 64)})
    model = nn.Linear(64, 64, bias=False)
    fully_shard(model, shard_placement_fn=lambda param: Shard(dim))

    def failing(*args: object) -> int:
        raise OSError("the disk went away")

    options = LoadOptions(buffer_bytes=1024)
    with patch.object(os, "preadv", failing if rank == 0 else os.preadv):
        kind: type[Exception] = OSError if rank == 0 else RankMismatchError
        with pytest.raises(kind, match="the disk went away"):
            load_safetensors(model, tmp_path, options=options)
    load_safetensors(model, tmp_path, options=options)  # both go on
    assert torch.equal(values_of(model)["weight"], torch.ones(64, 64))


@distributed(2)
def test_a_shard_that_its_mesh_does_not_fit_is_named(tmp_path: Path) -> None:
    saved_for_all(tmp_path, {"weight": torch.ones(4, 3)})
    ragged = DTensor.from_local(
        torch.zeros(1 + 2 * dist.get_rank(), 3),
        cpu_mesh(),
        [Shard(0)],
        shape=torch.Size((4, 3)),
        stride=(3, 1),
    )
    partial = DTensor.from_local(torch.zeros(4, 3), cpu_mesh(), [Partial()])
    for tensor, words in ((ragged, r"mesh and placements give it \(2, 3\)"), (partial, "a sum")):
        model = nn.Module()
        model.register_parameter("weight", nn.Parameter(tensor, requires_grad=False))
        with pytest.raises(WeightsError, match=words):
            load_safetensors(model, tmp_path)
        with pytest.raises(WeightsError, match=words):
            save_safetensors(model, tmp_path / "out")


@distributed(2)
def test_in_the_middle_of_a_step_neither_loads_nor_saves(tmp_path: Path) -> None:
    saved_for_all(tmp_path, STATE)
    model = fully_shard(nn.Linear(3, 4))
    said = []

    def inside(module: nn.Module, args: object) -> None:
        for call in (load_safetensors, save_safetensors):
            with pytest.raises(RuntimeError, match=f"{call.__name__}.. was called while") as raised:
                call(model, tmp_path)
            said.append(raised)

    model.register_forward_pre_hook(inside)
    model(torch.ones(1, 3)).sum().backward()
    assert len(said) == 2


@distributed(2)
def test_inside_an_unsharded_block_neither_loads_nor_saves(tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(3, 4))
    save_safetensors(model, tmp_path)
    for rank0_only in (False, True):
        with unsharded(model, writeback=True, rank0_only=rank0_only, offload_to_cpu=rank0_only):
            for call in (load_safetensors, save_safetensors):
                with pytest.raises(RuntimeError, match="outside of the block"):
                    call(model, tmp_path)
    load_safetensors(model, tmp_path)


_LOADS: dict[str, dict[str, Any]] = {
    "no options": {"options": {"buffer_bytes": 2048}},
    "no such device": {"options": LoadOptions(device="nonsense")},
    "other buffer": {"options": LoadOptions(buffer_bytes=1024)},
    "each by itself": {"options": LoadOptions(read_together=False)},
    "each replica": {"options": LoadOptions(replicas_read=True)},
}
_SAVES: dict[str, dict[str, Any]] = {
    "no options": {"options": {"buffer_bytes": 2048}},
    "no folder": {"folder": 5},
    "other size": {"max_shard_size": 50},
    "other dtype": {"dtype": torch.bfloat16},
    "other buffer": {"options": SaveOptions(buffer_bytes=1024)},
    "more writers": {"options": SaveOptions(writers_per_file=2)},
    "metadata": {"options": SaveOptions(metadata={"by": "rank 1"})},
    "other name": {"options": SaveOptions(stem="adapter_model")},
}


@pytest.mark.parametrize("given", _LOADS)
@distributed(2)
def test_what_is_wrong_or_other_on_one_rank_of_a_load_raises_on_all(
    given: str, tmp_path: Path
) -> None:
    model = fully_shard(nn.Linear(3, 4))
    save_safetensors(model, tmp_path)
    with pytest.raises((RankMismatchError, TypeError, RuntimeError)):
        load_safetensors(model, tmp_path, **(_LOADS[given] if dist.get_rank() else {}))
    load_safetensors(model, tmp_path)


@pytest.mark.parametrize("given", _SAVES)
@distributed(2)
def test_what_is_wrong_or_other_on_one_rank_of_a_save_raises_on_all(
    given: str, tmp_path: Path
) -> None:
    model = fully_shard(nn.Linear(3, 4))
    arguments = {"folder": tmp_path} | (_SAVES[given] if dist.get_rank() else {})
    with pytest.raises((RankMismatchError, TypeError)):
        save_safetensors(model, **arguments)
    assert not list(tmp_path.iterdir())
    dist.barrier()
    save_safetensors(model, tmp_path)
    load_safetensors(model, tmp_path)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="buffer_bytes is 5"):
        LoadOptions(buffer_bytes=5)
    with pytest.raises(TypeError, match="buffer_bytes is '1GB'"):
        LoadOptions(buffer_bytes="1GB")  # type: ignore[arg-type]  # meant
    with pytest.raises(TypeError, match=r"torch\.dtype"):
        load_safetensors(nn.Linear(2, 2), "x", dtype="bf16")  # type: ignore[arg-type]  # meant


def test_a_header_says_what_was_written(tmp_path: Path) -> None:
    told = {"b": (torch.float32, (2, 3)), "ä": (torch.bool, (5,))}
    text = header_bytes(told, {"format": "pt"})
    (tmp_path / "x").write_bytes(text + b"\0" * 29)
    header = read_header(tmp_path / "x")
    assert header.nbytes == len(text) and len(text) % 8 == 0
    assert header.metadata == {"format": "pt"}
    assert {n: (t.dtype, t.shape) for n, t in header.tensors.items()} == told
    assert [t.start - len(text) for t in header.tensors.values()] == [0, 24]
    with safe_open(tmp_path / "x", "pt") as opened:
        assert set(opened.keys()) == set(told)
