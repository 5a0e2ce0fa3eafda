"""Memory of one rank of 64, of which 63 are not there: the fake process group on a real card.

A model of 24 equal blocks, each far larger than a rank's part of the whole model, so that a block
left unsharded shows. All sizes are asked of torch's allocator.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from support.wide.fake import StorageSpy, fake_world
from support.wide.gpu import CARD, card
from support.wide.model import Stack, local, loss_of, shard

pytestmark = pytest.mark.gpu

WORLD, BLOCKS, WIDTH, HIDDEN = 64, 24, 512, 2048
BLOCK_BYTES = 4 * (2 * WIDTH * HIDDEN + HIDDEN + 2 * WIDTH)
SLACK = 2**21  # activations of one row, and what the allocator rounds up


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    card.init()
    card.set_device(CARD)
    with fake_world(WORLD, CARD.type) as mesh:
        yield mesh
    gc.collect()  # or one test's model would count as the next one's


def _sharded(mesh: DeviceMesh, *, reshard_after_forward: bool) -> Stack:
    model = shard(
        Stack(BLOCKS, WIDTH, HIDDEN), mesh=mesh, reshard_after_forward=reshard_after_forward
    )
    _step(model)  # plans, and makes what the libraries of the card keep
    return model


def _step(model: Stack) -> None:
    loss_of(model, _batch()).backward()
    model.zero_grad()


def _batch() -> torch.Tensor:
    return torch.ones(1, WIDTH, device=CARD)


def _allocated() -> int:
    card.synchronize()
    allocated: int = card.memory_allocated(CARD)
    return allocated


def _shard_bytes(model: Stack) -> int:
    return sum(local(param).nbytes for param in model.parameters())


def test_between_steps_a_rank_holds_its_shards_only(mesh: DeviceMesh) -> None:
    before = _allocated()
    model = _sharded(mesh, reshard_after_forward=True)
    first = _allocated()
    kept_by_libraries = 2**27  # workspaces of cuBLAS, made in the first step by each thread
    assert kept_by_libraries < BLOCKS * BLOCK_BYTES * 3 / 4
    assert first - before <= _shard_bytes(model) + SLACK + kept_by_libraries
    for _ in range(3):
        _step(model)
        assert _allocated() - first <= SLACK


def test_forward_frees_every_block_and_never_holds_more_than_one_and_its_buffer(
    mesh: DeviceMesh,
) -> None:
    model = _sharded(mesh, reshard_after_forward=True)
    spy = StorageSpy([module for module in model.modules() if not list(module.children())])
    base = _allocated()
    card.reset_peak_memory_stats(CARD)
    loss = loss_of(model, _batch())
    peak = card.max_memory_allocated(CARD)
    # A block, and the buffer its gather arrived in; one more for a buffer on its way out.
    assert BLOCK_BYTES <= peak - base <= 3 * BLOCK_BYTES + SLACK
    assert spy.nbytes == 0
    assert _allocated() - base <= SLACK
    del loss


def test_backward_holds_a_few_blocks_however_many_there_are(mesh: DeviceMesh) -> None:
    model = _sharded(mesh, reshard_after_forward=True)
    base = _allocated()
    loss = loss_of(model, _batch())
    card.reset_peak_memory_stats(CARD)
    loss.backward()
    peak = card.max_memory_allocated(CARD)
    # A block and its gradients, one gathered ahead, two inputs of reductions, one on its way out.
    bound = 6 * BLOCK_BYTES + _shard_bytes(model) + SLACK
    assert bound < BLOCKS * BLOCK_BYTES / 2
    assert peak - base <= bound
    del loss
    assert _allocated() - base <= _shard_bytes(model) + SLACK  # the sharded gradients


def test_without_resharding_the_blocks_stay_until_backward_freed_them(mesh: DeviceMesh) -> None:
    model = _sharded(mesh, reshard_after_forward=False)
    base = _allocated()
    loss = loss_of(model, _batch())
    assert _allocated() - base >= BLOCKS * BLOCK_BYTES
    loss.backward()
    del loss
    model.zero_grad()
    assert _allocated() - base <= SLACK
