"""Ranks of one machine that share no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.samehost import AllToAllTransport, peers, same_host_transport, set_shared_memory


@contextmanager
def apart() -> Iterator[DeviceMesh]:
    """A mesh of all ranks, which communicate as between hosts.

    Its axis has the name of its process group: torch keeps meshes, and where one is asked for hands
    out an equal one.
    """
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    with patch.object(peers, "host_identity", lambda: f"host {dist.get_rank()}"):
        assert same_host_transport(group) == AllToAllTransport()
    try:
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"apart_{group.group_name}",))
    finally:
        dist.destroy_process_group(group)


@contextmanager
def private_memory() -> Iterator[None]:
    """A context in which the process group itself moves everything."""
    set_shared_memory(False)
    try:
        yield
    finally:
        set_shared_memory(True)
