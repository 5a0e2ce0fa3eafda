"""Collectives as objects: composed of two choices, or the user's own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm.stand_ins import group_of
from fullshard.comm import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ReduceScatter,
    SelfTransport,
    default_all_gather,
    default_reduce_scatter,
)
from fullshard.comm.runtime.required import require
from support.collectives import Allocates


class _LateWork(dist.Work):
    """Does its transfer when it is waited for, so that decoding too early shows."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        super().__init__()
        self._target, self._source = target, source
        self.waits = 0

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.waits += 1
        self._target.copy_(self._source)
        return True


class _LateTransport:
    """World size 1, asynchronous."""

    def __init__(self, in_place: bool = True) -> None:
        self.in_place = in_place
        self.sent: list[torch.Tensor] = []
        self.works: list[_LateWork] = []

    def _move(self, output: torch.Tensor, input: torch.Tensor) -> dist.Work:
        self.sent.append(input)
        self.works.append(_LateWork(output, input))
        return self.works[-1]

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, process_group: object, async_op: bool
    ) -> dist.Work:
        return self._move(output, input)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: object,
        op: object,
        async_op: bool,
    ) -> dist.Work:
        return self._move(output, input)


def test_the_transports_own_work_comes_back() -> None:
    transport = _LateTransport()
    reduce = DefaultReduceScatter(transport=transport)
    data, output = torch.ones(3), torch.zeros(3)
    op = dist.ReduceOp.SUM
    work = reduce(output, data, group_of(0, 1), op, async_op=True)
    assert work is transport.works[0]
    assert transport.sent[0] is data


@pytest.mark.parametrize("in_place", [True, False])
def test_a_transport_that_cannot_gather_in_place_gets_an_input_of_its_own(in_place: bool) -> None:
    transport = _LateTransport(in_place)
    output = torch.arange(4.0)
    DefaultAllGather(transport=transport)(output, output, group_of(0, 1))
    assert (transport.sent[0].data_ptr() == output.data_ptr()) == in_place
    assert torch.equal(transport.sent[0], output)


def test_the_defaults_for_one_rank_move_nothing() -> None:
    alone, many = group_of(0, 1), group_of(0, 2)
    assert default_all_gather(alone).transport == SelfTransport()
    assert default_reduce_scatter(alone).transport == SelfTransport()
    assert default_all_gather(many).transport != SelfTransport()
    assert default_reduce_scatter(many).transport != SelfTransport()


class _DuckAllGather(Allocates):
    """As little as torch's fully_shard would accept."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return None


def test_what_has_the_methods_is_accepted_whatever_its_class() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllGather as TorchAllGather,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultReduceScatter as TorchReduceScatter,
    )

    for gather in (_DuckAllGather(), DefaultAllGather(), TorchAllGather()):
        require(AllGather, gather)
    for reduce in (DefaultReduceScatter(), TorchReduceScatter()):
        require(ReduceScatter, reduce)


class _NoAllocate:
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> None:
        return None


class _NoAsync(_DuckAllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_NoAllocate(), r"_NoAllocate, which is no AllGather: .* no usable allocate\(size"),
        (_NoAsync(), r"no usable __call__\(output_tensor, input_tensor, group, async_op\)"),
        (object(), r"no usable __call__\(.*\) and no allocate\("),
        (None, "NoneType"),
        (DefaultReduceScatter(), "no usable __call__"),
        (_DuckAllGather, r"must be an instance\. Pass _DuckAllGather\(\)"),
    ],
    ids=["allocate", "async_op", "nothing", "None", "a reduction", "a class"],
)
def test_what_is_missing_is_named(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        require(AllGather, value)
    with pytest.raises(TypeError, match=r"no ReduceScatter: .* no usable __call__\(.*op, async_op"):
        require(ReduceScatter, DefaultAllGather())


def test_the_interfaces_cannot_be_made_without_their_methods() -> None:
    for interface in (AllGather, ReduceScatter):
        assert interface.__abstractmethods__ == {"allocate", "__call__"}


def test_a_default_shows_its_two_choices() -> None:
    text = repr(DefaultAllGather(transport=SelfTransport()))
    assert text == "DefaultAllGather(transport=SelfTransport(), allocator=CachingAllocator())"
