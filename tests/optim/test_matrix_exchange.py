"""What a step sends: each part once to the owner and once back, and owners with equal work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.boxes import Box
from fullshard.optim import Muon
from fullshard.optim.newton_schulz import flops_of
from fullshard.optim.owners.balance import owners_of
from fullshard.samehost import SharedMemoryTransport, set_shared_memory
from support.optim.shapes import Shapes, gradients, groups_of
from support.optim.ways import WAYS, full_values, give
from support.products import few
from support.ranks import run_on_ranks
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads

EVEN = {"a": (8, 8), "b": (16, 4), "c": (4, 16), "d": (8, 24)}
NUMEL = 64 + 64 + 64 + 192


def _model(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    model = nn.Module()
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.ones(shape)))
    return model


def _sent(way: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Bytes that ranks send to others in a step, all together, and launches per rank."""
    calls: list[tuple[int, int]] = []  # of all ranks: they are threads, and share the function
    real = dist.all_to_all_single

    def counted(output: Any, input: Any, received: Any, sent: Any, **how: Any) -> Any:
        assert sent[dist.get_rank(how["group"])] == 0  # nothing is sent to oneself
        calls.append((dist.get_rank(), sum(sent)))
        return real(output, input, received, sent, **how)

    def body(rank: ThreadRank) -> None:
        model = _model(shapes)
        WAYS[way].apply(model)
        give(model, {name: torch.ones(shape) for name, shape in shapes.items()}, WAYS[way])
        Muon(model.parameters()).step()

    with patch.object(dist, "all_to_all_single", counted):
        run_program_on_threads(body, WAYS[way].world_size)
    launches = {rank: [by for by, _ in calls].count(rank) for rank, _ in calls}
    assert len(set(launches.values())) <= 1
    return sum(nbytes for _, nbytes in calls), max(launches.values(), default=0)


@pytest.mark.parametrize("way", ["one", "two", "four", "columns"])
def test_each_element_costs_4_bytes_for_each_rank_but_the_owner(way: str) -> None:
    """4 (W-1)/W bytes per element: 2 to the owner, and 2 back."""
    shapes = EVEN if way != "columns" else {"a": (8, 6), "b": (4, 9), "c": (2, 3)}
    numel = NUMEL if way != "columns" else 48 + 36 + 6
    world_size = WAYS[way].world_size
    nbytes, launches = _sent(way, shapes)
    assert nbytes * world_size == 4 * (world_size - 1) * numel
    assert launches == (0 if world_size == 1 else 2)


def test_on_a_hybrid_mesh_parts_go_to_the_owner_once_and_back_to_each_replica() -> None:
    nbytes, _ = _sent("hybrid", EVEN)  # 2 replicas of 2 shards
    assert nbytes == 2 * NUMEL // 2 + 2 * (2 * NUMEL - NUMEL // 2)


def test_copies_send_nothing_to_the_owner() -> None:
    nbytes, _ = _sent("copies", EVEN)
    assert nbytes == 2 * 2 * NUMEL


def test_an_expert_that_one_rank_holds_does_not_travel() -> None:
    assert _sent("two", {"experts": (4, 6, 5)})[0] == 0
    assert _sent("two", {"experts": (3, 6, 5)})[0] == 0


def test_large_matrices_travel_in_several_batches_with_the_same_result() -> None:
    def body(rank: ThreadRank) -> dict[str, torch.Tensor]:
        model = Shapes()
        WAYS["three"].apply(model)
        optimizer = Muon(groups_of(model))
        for step in range(2):
            give(model, gradients(step), WAYS["three"])
            optimizer.step()
        return {name: param.full_tensor() for name, param in model.named_parameters()}  # type: ignore[attr-defined]  # a DTensor

    expected = run_program_on_threads(body, 3)[0]
    with patch("fullshard.optim.owners.schedule._ELEMENTS", 100):
        found = run_program_on_threads(body, 3)[0]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_owners_are_balanced_by_flops_and_none_has_more_than_4_thirds_of_the_best() -> None:
    shapes = [(768, 768), (2304, 768), (3072, 768), (768, 3072)] * 12
    costs = [flops_of(*shape, 5) for shape in shapes]
    boxes = [Box.whole(shape) for shape in shapes]
    held = [
        [box.along(0, rank * box.size[0] // 4, box.size[0] // 4) for rank in range(4)]
        for box in boxes
    ]
    loads = [0] * 4
    owners = owners_of(boxes, costs, held, loads)
    assert sum(loads) == sum(costs)
    assert loads == [
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
        for rank in range(4)
    ]
    assert max(loads) <= 1.05 * sum(costs) / 4


def test_on_a_hybrid_mesh_every_replica_owns_its_share() -> None:
    def body(rank: ThreadRank) -> int:
        model = _model({f"w{index}": (8, 8) for index in range(8)})
        WAYS["hybrid"].apply(model)
        give(model, {f"w{index}": torch.ones(8, 8) for index in range(8)}, WAYS["hybrid"])
        optimizer = Muon(model.parameters())
        optimizer.step()
        return len(optimizer.owned_shapes)

    assert run_program_on_threads(body, 4) == [2, 2, 2, 2]


@pytest.mark.parametrize("way", few(["hybrid", "tensor parallel", "columns"], "hybrid"))
def test_through_shared_memory_comes_what_comes_through_the_process_group(way: str) -> None:
    results = run_on_ranks(_through_both, WAYS[way].world_size, way)
    assert results == [True] * WAYS[way].world_size


def _through_both(way: str) -> bool:
    found, launched, exchange = [], [], SharedMemoryTransport.exchange
    for shared in (True, False):
        set_shared_memory(shared)
        try:
            model = Shapes()
            WAYS[way].apply(model)
            optimizer = Muon(groups_of(model))
            for step in range(2):
                give(model, gradients(step), WAYS[way])
                with (
                    patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as moved,
                    patch.object(SharedMemoryTransport, "exchange", autospec=True) as in_memory,
                ):
                    in_memory.side_effect = exchange
                    optimizer.step()
                launched.append((in_memory.call_count, moved.call_count))
            found.append(full_values(model))
        finally:
            set_shared_memory(True)
    assert launched == [(2, 0)] * 2 + [(0, 2)] * 2
    return all(torch.equal(found[0][name], found[1][name]) for name in found[0])
