"""One rank of a world over torch's fake process group, whose collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_world(world_size: int, device_type: str = "cpu", rank: int = 0) -> Iterator[DeviceMesh]:
    """A 1-D mesh of ``world_size`` ranks, of which this process is ``rank`` and the only one."""
    backend = "fake" if device_type in ("cpu", "cuda") else f"cpu:fake,{device_type}:fake"
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        yield DeviceMesh.from_group(group, device_type)
    finally:
        dist.destroy_process_group()


class StorageSpy:
    """Remembers the storages of a module's parameters as its forward sees them: the full ones."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.largest = 0  # bytes of all of them that were there at once
        self._handles = [module.register_forward_hook(self._look) for module in modules]

    def _look(self, module: nn.Module, args: object, output: object) -> None:
        for param in module.parameters(recurse=False):
            storage = param.untyped_storage()
            self.storages[id(param)] = storage
        self.largest = max(self.largest, self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes that these storages hold now; storages that parameters share count once."""
        unique = {storage._cdata: storage for storage in self.storages.values()}
        return sum(storage.nbytes() for storage in unique.values())
