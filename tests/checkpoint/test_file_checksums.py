"""Checkpoints whose files are no more as ``async_save`` wrote them."""

from __future__ import annotations

import os
import signal
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from fullshard.checkpoint import DamagedCheckpointError, async_save, check_checkpoint
from fullshard.comm import PeerLostError
from fullshard.sharding import fully_shard
from support.ranks import RanksFailed, distributed, run_on_ranks
from support.surface.model import build, sharded
from support.surface.wrappings import adamw

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def _state() -> dict[str, Any]:
    net = sharded(build())
    model, optimizer = get_state_dict(net, adamw(net.parameters()))
    return {"model": model, "optimizer": optimizer, "step": 3}


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_flip, "is not as it was written"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is not as it was written"),
        (Path.unlink, "cannot be read"),
    ],
)
@distributed(2)
def test_a_damaged_file_is_named_on_every_rank(damage: Any, said: str, tmp_path: Path) -> None:
    async_save(_state(), tmp_path).result()
    assert check_checkpoint(tmp_path)
    files = sorted(tmp_path.glob("*.distcp"))
    dist.barrier()
    if dist.get_rank() == 0:
        damage(files[1])
    dist.barrier()
    with pytest.raises(DamagedCheckpointError, match=f"{files[1].name} {said}") as caught:
        check_checkpoint(tmp_path)
    assert caught.value.files == (files[1].name,)


@distributed(2)
def test_checksums_are_those_of_the_last_save_and_a_checkpoint_of_torch_has_none(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        async_save(_state(), tmp_path / "ours").result()
    assert check_checkpoint(tmp_path / "ours")
    assert len(list((tmp_path / "ours").glob(".checksums-*"))) == 1
    dcp.save(_state(), checkpoint_id=tmp_path / "torchs")
    assert not check_checkpoint(tmp_path / "torchs")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        check_checkpoint(tmp_path / "none")
    # storage that only rank 0 has: both ranks raise, and none waits
    with pytest.raises(FileNotFoundError, match=r"\.metadata is missing on rank 1"):
        check_checkpoint(tmp_path / ("none" if dist.get_rank() else "ours"))


@pytest.mark.parametrize(
    ("name", "said"),
    [(".metadata", r"\.metadata is not as it was written"), (".checksums-*", "cannot be read")],
)
@distributed(2)
def test_a_damaged_index_is_an_error_on_every_rank(name: str, said: str, tmp_path: Path) -> None:
    async_save(_state(), tmp_path).result()
    (path,) = tmp_path.glob(name)
    dist.barrier()
    if dist.get_rank() == 0:
        path.write_bytes(b"{" + path.read_bytes()[1:-1])
    dist.barrier()
    with pytest.raises(DamagedCheckpointError, match=said):
        check_checkpoint(tmp_path)


@distributed(2)
def test_every_bit_of_the_metadata_counts(tmp_path: Path) -> None:
    async_save(_state(), tmp_path).result()
    path = tmp_path / ".metadata"
    whole = path.read_bytes()
    dist.barrier()
    for place in range(0, len(whole), len(whole) // 20):
        if dist.get_rank() == 0:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        dist.barrier()
        with pytest.raises(DamagedCheckpointError):
            check_checkpoint(tmp_path)
        dist.barrier()


def _saves_after_a_rank_has_ended(folder: Path) -> str:
    dist.all_reduce(torch.ones(1))
    state = _state()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        async_save(state, folder)
    return str(caught.value)


def test_the_first_save_after_a_rank_has_ended_raises_and_does_not_wait(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as ended:
        run_on_ranks(_saves_after_a_rank_has_ended, 2, tmp_path, fresh=True)
    assert ended.value.results[0].startswith("rank 1 has ended")


@pytest.mark.parametrize("computed", [True, False])
def test_the_checksum_of_large_tensors_is_that_of_the_whole_file(
    computed: bool, tmp_path: Path
) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(computed)
    try:
        sizes = [10, 2**18, 2**18 + 3, 300_001, 7]
        async_save({str(n): torch.randn(n) for n in sizes}, tmp_path).result()
    finally:
        torch.serialization.set_crc32_options(before)
    assert check_checkpoint(tmp_path)  # reads every byte
    _flip(next(tmp_path.glob("*.distcp")))
    with pytest.raises(DamagedCheckpointError, match="is not as it was written"):
        check_checkpoint(tmp_path)


@distributed(2)
def test_a_save_computes_no_checksum_of_large_shards_again(tmp_path: Path) -> None:
    state, read, crc32 = fully_shard(nn.Linear(1024, 1024)).state_dict(), [0], zlib.crc32

    def counted(data: Any, before: int = 0) -> int:
        read[0] += len(data)
        return crc32(data, before)

    with patch.object(zlib, "crc32", counted):
        async_save(state, tmp_path).result()
    assert 0 < read[0] < 2**17 < state["weight"].to_local().nbytes
    dist.barrier()
    assert check_checkpoint(tmp_path)
