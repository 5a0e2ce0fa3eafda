"""Checksums of safetensors files: a bit that flips on a disk is found, by every way to read it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fullshard.checkpoint import (
    LoadOptions,
    Rule,
    SaveOptions,
    WeightsError,
    load_safetensors,
    save_safetensors,
)
from fullshard.checkpoint.files.checksums import CHUNK, KEY
from fullshard.checkpoint.files.headers import read_header
from fullshard.sharding import RankMismatchError, fully_shard
from support.products import few
from support.ranks import distributed
from support.surface.ranks import everyone
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads
from support.weights import saved, values_of

ROWS = 640  # of 256 float32: 2.5 chunks


def _sharded(dim: int = 0) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, ROWS), nn.Linear(3, 4))
    return fully_shard(model, shard_placement_fn=lambda p: Shard(dim if p.ndim > 1 else 0))


def _flip(file: Path, name: str, byte: int) -> None:
    """Flip a bit of a tensor: of byte ``byte``, counted from its end if it is negative."""
    stored = read_header(file).tensors[name]
    content = bytearray(file.read_bytes())
    content[stored.start + byte % stored.nbytes] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize(
    "byte", few([0, -1, CHUNK - 1, CHUNK, ROWS * 512 - 1, ROWS * 512], 0, CHUNK, ROWS * 512 - 1)
)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("buffer", [64 * 2**20, 4096])
@pytest.mark.cross
@distributed(2)
def test_a_flipped_bit_raises_on_every_rank_and_names_file_and_tensor(
    buffer: int, dim: int, byte: int, tmp_path: Path
) -> None:
    model = _sharded(dim)
    (file,) = save_safetensors(model, tmp_path).files
    if dist.get_rank() == 0:
        _flip(file, "0.weight", byte)
    dist.barrier()
    options = LoadOptions(buffer_bytes=buffer)
    with pytest.raises((WeightsError, RankMismatchError)) as caught:
        load_safetensors(_sharded(dim), tmp_path, options=options)
    words = f"{file} is damaged in 0.weight"
    assert all(words in said for said in everyone(str(caught.value)))
    load_safetensors(model, tmp_path, options=LoadOptions(checksums=False))  # as it is


@distributed(2)
def test_a_bit_that_flips_in_a_tensor_of_one_chunk_is_found_by_both_ranks(tmp_path: Path) -> None:
    (file,) = save_safetensors(_sharded(), tmp_path).files
    if dist.get_rank() == 0:
        _flip(file, "1.bias", 2)  # in the shard of rank 0
    dist.barrier()
    with pytest.raises(WeightsError, match=r"is damaged in 1\.bias.* copy the file again"):
        load_safetensors(_sharded(), tmp_path)


def test_a_part_that_a_rule_reads_is_checked(tmp_path: Path) -> None:
    both = nn.Linear(256, ROWS, bias=False)
    (file,) = save_safetensors(both, tmp_path).files
    half = nn.Linear(256, ROWS // 2, bias=False)
    rules = [Rule(("weight", "other"), "weight")]
    model = nn.ParameterDict({"weight": half.weight, "other": nn.Parameter(half.weight.clone())})
    load_safetensors(model, tmp_path, rename=rules)
    assert torch.equal(torch.cat([model["weight"], model["other"]]), both.weight)
    _flip(file, "weight", -1)
    with pytest.raises(WeightsError, match="is damaged in weight"):
        load_safetensors(model, tmp_path, rename=rules)


@pytest.mark.parametrize("writers", [1, 3])
@pytest.mark.parametrize("buffer", [64 * 2**20, 100_000])
def test_what_is_saved_is_the_crc32_of_each_chunk(
    buffer: int, writers: int, tmp_path: Path
) -> None:
    def body(rank: ThreadRank) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, ROWS), nn.Linear(3, 4, dtype=torch.float64))
        model.register_buffer("none", torch.zeros(0))
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        options = SaveOptions(buffer_bytes=buffer, writers_per_file=writers)
        save_safetensors(model, tmp_path, options=options)

    run_program_on_threads(body, 3)
    file = tmp_path / "model.safetensors"
    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()[KEY])
    tensors = load_file(file)
    assert told["chunk"] == CHUNK and told["tensors"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        content = tensor.flatten().view(torch.uint8).numpy().tobytes()
        chunks = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
        assert told["tensors"][name] == "".join(f"{zlib.crc32(chunk):08x}" for chunk in chunks)


@distributed(2)
def test_a_rank_reads_at_most_a_chunk_beyond_each_end_of_its_shard(tmp_path: Path) -> None:
    model = _sharded()
    save_safetensors(model, tmp_path)
    report = load_safetensors(model, tmp_path)
    assert report.bytes_requested == report.bytes_needed
    assert 0 < report.bytes_beyond < 2 * CHUNK + 4 * (ROWS + 4 * 3 + 4)
    unchecked = load_safetensors(model, tmp_path, options=LoadOptions(checksums=False))
    assert unchecked.bytes_beyond == 0


def test_files_of_others_have_no_checksums_and_load(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    saved(tmp_path, {name: value.clone() for name, value in values_of(model).items()})
    assert load_safetensors(nn.Linear(3, 4), tmp_path).bytes_beyond == 0
    save_safetensors(model, tmp_path, options=SaveOptions(checksums=False))
    assert read_header(tmp_path / "model.safetensors").metadata == {"format": "pt"}


def test_metadata_of_one_set_may_be_passed_to_the_save_of_another(tmp_path: Path) -> None:
    (file,) = save_safetensors(nn.Linear(3, 4), tmp_path).files
    other = nn.Linear(3, 4)
    options = SaveOptions(metadata=read_header(file).metadata)
    save_safetensors(other, tmp_path, options=options)
    load_safetensors(nn.Linear(3, 4), tmp_path)
    save_safetensors(
        other, tmp_path, options=SaveOptions(metadata=read_header(file).metadata, checksums=False)
    )
    assert KEY not in read_header(file).metadata


@pytest.mark.parametrize("text", ["{}", "[]", '{"chunk": 0, "tensors": {}}', "no JSON", "short"])
def test_checksums_that_cannot_be_read_are_an_error_that_says_how_to_go_on(
    text: str, tmp_path: Path
) -> None:
    state = {name: value.clone() for name, value in values_of(nn.Linear(3, 4)).items()}
    if text == "short":
        text = json.dumps({"chunk": CHUNK, "tensors": {"weight": "0011"}})
    save_file(state, tmp_path / "model.safetensors", metadata={KEY: text})
    with pytest.raises(WeightsError, match=r"LoadOptions\(checksums=False\)"):
        load_safetensors(nn.Linear(3, 4), tmp_path)
    load_safetensors(nn.Linear(3, 4), tmp_path, options=LoadOptions(checksums=False))
