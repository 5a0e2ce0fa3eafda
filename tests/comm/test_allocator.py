"""Where buffers come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.comm import CachingAllocator, ProcessGroupAllocator
from support.ranks import distributed, world

CPU = torch.device("cpu")


def test_the_caching_allocator_gives_a_new_contiguous_tensor_each_time() -> None:
    allocator = CachingAllocator()
    first = allocator.empty((2, 3), dtype=torch.bfloat16, device=CPU)
    second = allocator.empty((2, 3), dtype=torch.bfloat16, device=CPU)
    assert (first.shape, first.dtype, first.device) == ((2, 3), torch.bfloat16, CPU)
    assert first.is_contiguous()
    assert first.data_ptr() != second.data_ptr()


class _AllocatingBackend:
    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return device == CPU

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.full((numel,), 7, dtype=dtype, device=device)

    def name(self) -> str:
        return "registering"


class _AllocatingGroup:
    def _get_backend(self, device: torch.device) -> Any:
        return _AllocatingBackend()


def test_the_process_groups_own_memory_is_used_where_the_backend_allocates() -> None:
    allocator = ProcessGroupAllocator(_AllocatingGroup())  # type: ignore[arg-type]
    tensor = allocator.empty((2, 3), dtype=torch.int32, device=CPU)
    assert torch.equal(tensor, torch.full((2, 3), 7, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"meta is registering, which does not\s+allocate"):
        allocator.empty((2,), dtype=torch.int32, device=torch.device("meta"))


@distributed(2)
def test_gloo_which_cannot_allocate_is_refused_by_name() -> None:
    group = world()
    with pytest.raises(ValueError, match=r"gloo.*CachingAllocator"):
        ProcessGroupAllocator(group).empty((4,), dtype=torch.float32, device=CPU)
