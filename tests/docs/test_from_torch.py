"""The page on moving from torch tells the truth about torch's names."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.sharding import FSDPModule, fully_shard
from support.ranks import distributed


def _public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_every_method_of_torchs_module_is_there() -> None:
    assert _public(torch_fsdp.FSDPModule) <= _public(FSDPModule)


@distributed(2)
def test_checkpoints_written_by_either_load_into_the_other(tmp_path: Path) -> None:
    for write, read in (
        (torch_fsdp.fully_shard, fully_shard),
        (fully_shard, torch_fsdp.fully_shard),
    ):
        written, loaded = nn.Linear(5, 3), nn.Linear(5, 3)
        write(written)
        read(loaded)
        dcp.save(written.state_dict(), checkpoint_id=tmp_path / write.__module__)
        nn.init.zeros_(loaded.weight)
        state = loaded.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / write.__module__)
        loaded.load_state_dict(state)
        for one, other in zip(written.parameters(), loaded.parameters(), strict=True):
            assert isinstance(one, DTensor) and isinstance(other, DTensor)
            assert torch.equal(one.full_tensor(), other.full_tensor())
    dist.barrier()
