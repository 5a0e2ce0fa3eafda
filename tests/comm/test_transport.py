"""Who moves the bytes: alone, and over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from comm.launches import finish, launch
from comm.stand_ins import group_of
from fullshard.comm import (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupTransport,
    SelfTransport,
    Transport,
)
from fullshard.comm.transports.collective import Collective
from fullshard.comm.transports.transport import adapted
from fullshard.samehost import AllToAllTransport, SharedMemoryTransport
from fullshard.samehost.automatic import AutomaticTransport
from support.ranks import distributed


def test_self_leaves_an_output_that_is_its_input_alone_and_copies_any_other() -> None:
    transport: Transport = SelfTransport()
    group = group_of(0, 1)
    data = torch.arange(4.0)
    version = data._version
    assert transport.all_gather(data, data, group, True) is None
    assert data._version == version  # nothing was written
    other = torch.zeros(4)
    assert transport.all_gather(other, data, group, False) is None
    assert torch.equal(other, data)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
def test_the_sum_and_the_average_over_one_rank_are_its_input(op: dist.ReduceOp.RedOpType) -> None:
    data, output = torch.arange(4.0), torch.zeros(4)
    work = SelfTransport().reduce_scatter(output, data, group_of(0, 1), op, True)
    assert work is None
    assert torch.equal(output, data)


def test_self_is_for_one_rank_only() -> None:
    data = torch.zeros(2)
    with pytest.raises(ValueError, match="process group of 2 ranks"):
        SelfTransport().all_gather(data, data, group_of(0, 2), False)


TRANSPORTS: dict[str, Transport] = {
    "group": ProcessGroupTransport(),
    "all-to-all": AllToAllTransport(),
    "shared": SharedMemoryTransport(),
}
NUMBERS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]
NUMBERS += [torch.int16, torch.int8, torch.uint8]
OTHERS = [torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("async_op", [True, False])
@pytest.mark.parametrize(
    ("transport", "kind", "dtypes"),
    [
        ("group", "gather in place", NUMBERS + OTHERS),
        ("group", "reduction", [torch.float32]),
        ("all-to-all", "gather", NUMBERS + OTHERS),
        ("all-to-all", "gather in place", NUMBERS + OTHERS),
        ("all-to-all", "reduction", NUMBERS),
        ("all-to-all", "largest parts", NUMBERS),
        ("shared", "gather", NUMBERS + OTHERS),
        ("shared", "gather in place", NUMBERS + OTHERS),
        ("shared", "reduction", NUMBERS),
        ("shared", "largest parts", NUMBERS),
        ("shared", "all-reduce", NUMBERS),
        ("shared", "largest", NUMBERS),
    ],
)
@distributed(2, 3, 4, matrix=[4])
def test_a_transport_gives_what_the_definition_of_the_collective_says(
    transport: str, kind: str, dtypes: list[torch.dtype], async_op: bool
) -> None:
    for dtype in dtypes:
        moves = TRANSPORTS[transport]
        work, output, wanted = launch(moves, kind, 41, dtype, async_op=async_op)
        assert (work is not None) == async_op
        finish(work)
        assert transport == "group" or work is None or work.is_completed()
        finish(work)  # again: nothing
        assert torch.equal(output.view(torch.uint8), wanted.view(torch.uint8)), dtype


GATHER = ("open_shared_buffer",)
REDUCTION = ("parts_reducer",)
BOTH = ("resolve", "aliases_input", "is_automatic")
KINDS = [
    AllToAllTransport,
    AutomaticTransport,
    ProcessGroupTransport,
    SelfTransport,
    SharedMemoryTransport,
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_subclass_sees_what_it_overrides_whatever_its_base_can_do(kind: type[Transport]) -> None:
    def moves(self: Transport, *given: object) -> None:
        """Something else."""

    gathers: type[Transport] = type("Gathers", (kind,), {"all_gather": moves})
    reduces: type[Transport] = type("Reduces", (kind,), {"reduce_scatter": moves})
    for name in (*GATHER, *BOTH):
        assert getattr(gathers, name) is getattr(Transport, name)
    for name in (*REDUCTION, *BOTH):
        assert getattr(reduces, name) is getattr(Transport, name)
    for name in REDUCTION:
        assert getattr(gathers, name) is getattr(kind, name)
    for name in GATHER:
        assert getattr(reduces, name) is getattr(kind, name)
    further: type[Transport] = type("Further", (gathers,), {})
    assert further.open_shared_buffer is Transport.open_shared_buffer
    mixin = type("Mixin", (), {"__slots__": (), "all_gather": moves})
    mixed: type[Transport] = type("Mixed", (mixin, kind), {})
    for name in (*GATHER, *BOTH):
        assert getattr(mixed, name) is getattr(Transport, name)
    for name in REDUCTION:
        assert getattr(mixed, name) is getattr(kind, name)


def test_a_subclass_may_declare_capabilities_of_the_method_that_it_overrides() -> None:
    class Own(ProcessGroupTransport):
        def all_gather(self, *given: object) -> None:
            """Something else."""

        def aliases_input(self, process_group: object) -> bool:
            return True

    group = group_of(0, 2)
    comm = Collective(DefaultAllGather(transport=Own()))
    assert comm.offers.aliases_input(group)


class _Minimal:
    """The documented members, and more that nobody declared to be a capability."""

    in_place = True

    def all_gather(self, *given: object) -> None:
        """Nothing."""

    def reduce_scatter(self, *given: object) -> None:
        """Nothing."""

    def aliases_input(self, process_group: object) -> bool:
        return True


def test_a_transport_without_the_base_class_is_only_called() -> None:
    group = group_of(0, 1)
    own = _Minimal()
    for comm in (DefaultAllGather(transport=own), DefaultReduceScatter(transport=own)):
        assert comm.transport is own
        collective = Collective(comm)
        assert not collective.offers.aliases_input(group)
        assert not collective.is_automatic
    transport = ProcessGroupTransport()
    assert adapted(transport) is transport
