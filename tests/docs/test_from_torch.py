"""The page on moving from torch tells the truth about torch's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor

from fullshard.sharding import fully_shard
from support.ranks import distributed


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


@distributed(2)
def test_torchs_tracker_of_sharded_memory_refuses_us_and_its_other_tracker_sees_shards() -> None:
    model = fully_shard(nn.Linear(64, 64))
    with pytest.raises(AssertionError, match="only supports FSDP modules"):
        FSDPMemTracker(model)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker, pytest.warns(RuntimeWarning, match="never calls"):  # its hooks on gradients
        model(torch.ones(2, 64)).sum().backward()
        seen = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    shards = sum(param.to_local().nbytes for param in model.parameters())  # type: ignore[attr-defined]
    (parameters,) = [size for kind, size in seen.items() if str(kind).endswith("PARAM")]
    assert parameters == shards
