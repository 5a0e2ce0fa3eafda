"""One rank of 8 and of 1024 that are not there: sizes, memory and the calls of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.comm import EventKind, EventLog, observe
from support.wide.fake import StorageSpy, fake_world
from support.wide.model import WIDTH, Stack, loss_of, make_stack, shard

BLOCKS = 3
CALLS = (EventKind.UNSHARD, EventKind.RESHARD, EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER)


@pytest.fixture(params=[8, 1024])
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    with fake_world(request.param) as mesh:
        yield mesh


def _sharded(mesh: DeviceMesh, **options: Any) -> Stack:
    return shard(make_stack(BLOCKS), mesh=mesh, **options)


def _leaves(model: Stack) -> list[torch.nn.Module]:
    return [module for module in model.modules() if not list(module.children())]


def _full_bytes(model: Stack) -> list[int]:
    """Bytes of the unsharded parameters of each block, then of the root's own."""
    parts = [list(block.parameters()) for block in model.blocks]
    parts.append(list(model.head.parameters()))
    return [sum(4 * param.numel() for param in part) for part in parts]


def test_a_rank_stores_its_part_of_each_parameter_and_gradient(mesh: DeviceMesh) -> None:
    model = _sharded(mesh)
    full = [param.shape for param in make_stack(BLOCKS).parameters()]
    loss_of(model, torch.ones(4, WIDTH)).backward()
    for param, shape in zip(model.parameters(), full, strict=True):
        rows = -(-shape[0] // mesh.size())  # this is rank 0, which always has a full chunk
        assert isinstance(param, DTensor)
        assert isinstance(param.grad, DTensor)
        assert param.shape == param.grad.shape == shape
        assert param.to_local().shape == param.grad.to_local().shape == (rows, *shape[1:])


def test_the_last_rank_of_a_world_wider_than_the_model_stores_nothing() -> None:
    with fake_world(1024, rank=1023) as mesh:
        model = _sharded(mesh)
        loss_of(model, torch.ones(4, WIDTH)).backward()
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert isinstance(param.grad, DTensor)
            assert param.to_local().numel() == param.grad.to_local().numel() == 0


def test_unsharded_memory_is_freed_after_forward_and_after_backward(mesh: DeviceMesh) -> None:
    model = _sharded(mesh, reshard_after_forward=True)
    sizes = _full_bytes(model)
    spy = StorageSpy(_leaves(model))
    loss = loss_of(model, torch.ones(4, WIDTH))
    assert spy.nbytes == 0
    # One block and the root's own are there at once, each parameter rounded up to 64 bytes.
    rounding = 64 * len(list(model.parameters()))
    assert sizes[-1] + max(sizes[:-1]) <= spy.largest <= sizes[-1] + max(sizes[:-1]) + rounding
    loss.backward()
    assert spy.nbytes == 0


def test_unsharded_memory_stays_until_backward_where_it_is_asked_to(mesh: DeviceMesh) -> None:
    model = _sharded(mesh, reshard_after_forward=False)
    spy = StorageSpy(_leaves(model))
    loss = loss_of(model, torch.ones(4, WIDTH))
    assert spy.nbytes >= sum(_full_bytes(model))
    loss.backward()
    assert spy.nbytes == 0


def test_the_calls_of_a_step_do_not_depend_on_the_number_of_ranks() -> None:
    logs = []
    for world_size in (8, 1024):
        with fake_world(world_size) as mesh, observe(EventLog()) as log:
            assert isinstance(log, EventLog)
            model = _sharded(mesh)
            for _ in range(2):
                loss_of(model, torch.ones(4, WIDTH)).backward()
            logs.append([(event.kind, event.name) for event in log.of(*CALLS)])
    assert logs[0] == logs[1]
    gathers = [name for kind, name in logs[0] if kind is EventKind.ALL_GATHER]
    assert len(gathers) == (1 + BLOCKS + 1) + (1 + 1 + 1)  # from the second on the blocks' is one
