"""The two calls for programs that use this package alone."""

from __future__ import annotations

import pytest
import torch

from comm.stand_ins import group_of
from fullshard.comm import (
    EventKind,
    EventLog,
    TensorSpec,
    all_gather_tensors,
    observe,
    reduce_scatter_tensors,
)
from support.ranks import distributed, world


@distributed(2, 4)
def test_gathering_undoes_torch_chunk_in_one_collective() -> None:
    group = world()
    fulls = [torch.arange(10.0).view(5, 2), torch.arange(12).view(3, 4).to(torch.int16)]
    specs = [
        TensorSpec(shape=(5, 2), dtype=torch.float32),
        TensorSpec(shape=(3, 4), dtype=torch.int16, dim=1),
    ]
    shards = []
    for full, spec in zip(fulls, specs, strict=True):
        chunks = full.chunk(group.size(), spec.dim)
        empty = torch.empty(spec.shard_shape(group.size() - 1, group.size()), dtype=spec.dtype)
        shards.append(chunks[group.rank()] if group.rank() < len(chunks) else empty)
    log = EventLog()
    with observe(log):
        outputs = all_gather_tensors(shards, specs, group)
    assert all(torch.equal(*pair) for pair in zip(outputs, fulls, strict=True))
    assert len(log.of(EventKind.ALL_GATHER)) == 1


@distributed(2)
def test_reducing_gives_shards_of_the_mean_in_one_collective_per_dtype() -> None:
    group = world()
    factor = 1.0 + group.rank()  # 1 and 2: the mean is 1.5
    gradients = [
        torch.arange(4.0) * factor,
        (torch.arange(6) * factor).double().view(3, 2),
        torch.tensor(8.0) * factor,
    ]
    log = EventLog()
    with observe(log):
        shards = reduce_scatter_tensors(gradients, None, group)
    assert len(log.of(EventKind.REDUCE_SCATTER)) == 2
    wanted = (
        [[0.0, 1.5], [[0.0, 1.5], [3.0, 4.5]], [12.0]]
        if group.rank() == 0
        else [[3.0, 4.5], [[6.0, 7.5]], []]
    )
    assert [shard.tolist() for shard in shards] == wanted
    assert [shard.dtype for shard in shards] == [torch.float32, torch.float64, torch.float32]


@distributed(2)
def test_specs_choose_the_dim_and_the_dtype_and_a_factor_the_divisor() -> None:
    group = world()
    gradient = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    spec = TensorSpec(shape=(2, 3), dtype=torch.float32, dim=1)
    (shard,) = reduce_scatter_tensors([gradient], [spec], group, divide_factor=1.0)
    wanted = (2 * gradient.float())[:, :2] if group.rank() == 0 else (2 * gradient.float())[:, 2:]
    assert torch.equal(shard, wanted)


def test_no_tensors_are_no_collective() -> None:
    group = group_of(0, 2)
    assert all_gather_tensors([], [], group) == []
    assert reduce_scatter_tensors([], None, group) == []


def test_lists_that_do_not_fit_are_refused() -> None:
    group = group_of(0, 2)
    spec = TensorSpec(shape=(4,), dtype=torch.float32)
    with pytest.raises(ValueError, match="no tensors for the given specs"):
        all_gather_tensors([], [spec], group)
    with pytest.raises(ValueError, match=r"shard 0 has shape \(4,\)"):
        all_gather_tensors([torch.zeros(4)], [spec], group)
    whole = TensorSpec(shape=(2,), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"shard 0 has dtype torch\.float32.*torch\.int64"):
        all_gather_tensors([torch.tensor([1.7])], [whole], group)
    with pytest.raises(ValueError, match="1 gradients and 2 specs"):
        reduce_scatter_tensors([torch.zeros(4)], [spec, spec], group)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        reduce_scatter_tensors([torch.zeros(4, dtype=torch.int64)], None, group)
