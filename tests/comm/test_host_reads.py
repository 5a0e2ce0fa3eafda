"""The host reads tensors, unless somebody else answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fullshard.comm.runtime.host_reads import host_reads_by, host_values


def _alike(tensor: torch.Tensor, alike: Sequence[Any]) -> Sequence[Any]:
    return alike


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_values_are_the_tensors_own(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    assert host_values(tensor, [0.0]) == [each.item() for each in tensor.flatten()]


def test_a_reader_answers_inside_its_context_and_the_innermost_of_several() -> None:
    tensor = torch.zeros(2, device="meta")
    with host_reads_by(_alike):
        assert host_values(tensor, [True, False]) == [True, False]
        with pytest.raises(KeyError), host_reads_by(_alike):
            raise KeyError
        assert host_values(tensor, [1]) == [1]
    assert host_values(torch.ones(1), [0.0]) == [1.0]
