"""Who holds a tensor, and its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fullshard.comm import are_held_by
from fullshard.comm.buffers.holders import is_memory_of


def test_a_list_alone_holds_its_tensors() -> None:
    assert are_held_by([], [])
    assert are_held_by([torch.ones(1), torch.ones(2)], [0, 0])


def test_python_objects_that_are_not_accounted_for_hold() -> None:
    kept = torch.ones(1)
    tensors = [kept, torch.ones(2)]
    assert not are_held_by(tensors, [0, 0])
    assert are_held_by(tensors, [1, 0])


def test_what_holds_a_tensor_in_cpp_holds() -> None:
    param = torch.ones(1, requires_grad=True)
    tensors = [torch.ones(1)]
    param.grad = tensors[0]
    assert not are_held_by(tensors, [0])
    param.grad = None
    assert are_held_by(tensors, [0])


def test_memory_is_that_of_its_tensors() -> None:
    base = torch.ones(4)
    assert is_memory_of(base, 1)
    views = base.split(2)
    assert is_memory_of(base, 3)
    assert not is_memory_of(base, 1)
    del views
    assert is_memory_of(base, 1)


LOOKS: dict[str, Callable[[torch.Tensor], object]] = {
    "detached": torch.Tensor.detach,
    "a view": lambda tensor: tensor[:1],
    "an array": torch.Tensor.numpy,
    "the storage": torch.Tensor.untyped_storage,
    "a capsule": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_at_memory_is_found_and_then_gone(look: str) -> None:
    tensors = [torch.ones(4)]
    kept = LOOKS[look](tensors[0])
    seen = not _is_nobodys(tensors)  # asserted apart: an assertion keeps what it is made of
    del kept
    gone = _is_nobodys(tensors)
    assert seen
    assert gone


def _is_nobodys(tensors: list[torch.Tensor]) -> bool:
    return is_memory_of(tensors[0], 1) and are_held_by(tensors, [0])
