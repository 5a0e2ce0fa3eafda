"""Connections between groups: no rank uses one before all ranks have theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fullshard.elastic.compat import end_of
from fullshard.elastic.links import connected
from support.elastic.late_store import LateStore
from support.ranks import distributed


@pytest.mark.parametrize("late", [0, 1])
@distributed(2)
def test_no_rank_leaves_before_all_are_connected(late: int) -> None:
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        told[0] = server.port
    dist.broadcast_object_list(told, src=0)
    client = dist.TCPStore("127.0.0.1", told[0], is_master=False, wait_for_workers=False)
    store = LateStore(client) if dist.get_rank() == late else client
    group = connected(store, "lane", dist.get_rank(), 2, 20.0)
    end_of(group)
    client.set("left", "1")
    assert not (isinstance(store, LateStore) and store.saw_a_rank_leave)
    dist.barrier()  # the store is rank 0's
