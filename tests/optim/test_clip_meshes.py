"""``clip_grad_norm_`` where parameters lie on several meshes: each part counts once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from fullshard.comm import EventKind, EventLog, observe
from fullshard.optim import clip_grad_norm_, grad_norm
from fullshard.sharding import fully_shard
from support.modules import Assembled
from support.parity.compare import assert_equal, gradients_of, rounding
from support.ranks import cpu_mesh, distributed

BOTH_ORDERS = pytest.mark.parametrize("order", [2.0, math.inf])
DTYPE = torch.float64


def grid() -> DeviceMesh:
    return cpu_mesh((2, 2), ("outer", "inner"))


def numbers(*seed: int, shape: tuple[int, ...] = (7, 3)) -> torch.Tensor:
    """A gradient, the same on every rank that gives the same seed."""
    code = 17
    for part in seed:
        code = code * 31 + part
    return torch.randn(shape, generator=torch.Generator().manual_seed(code), dtype=DTYPE)


def norm_of(gradients: list[torch.Tensor], order: float) -> torch.Tensor:
    """The definition: all gradients as one vector."""
    return torch.linalg.vector_norm(torch.cat([each.flatten() for each in gradients]), order)


def parameter(gradient: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    """A sharded parameter that has this gradient."""
    param = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
    param.grad = distribute_tensor(gradient.clone(), mesh, placements)
    return param


def fsdp(gradient: torch.Tensor, mesh: DeviceMesh, *, scale: float = 1.0) -> nn.Module:
    """A module sharded over ``mesh`` by ``fully_shard``, whose backward leaves this gradient."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    times = Assembled(lambda m, x: (m.weight * x).sum(), weight=weight)
    module = fully_shard(times, mesh=mesh)
    module(gradient * scale).backward()
    return module


def all_reduces(call: Callable[[], object]) -> int:
    """How many all-reduces ``call`` makes, if it makes nothing else."""
    log = EventLog()
    with CommDebugMode() as mode, observe(log):
        call()
    counts = {str(kind).split(".")[-1]: n for kind, n in mode.get_comm_counts().items() if n}
    assert set(counts) <= {"allreduce_"}, counts
    assert {event.kind for event in log.events} <= {EventKind.ALL_REDUCE}
    assert counts.get("allreduce_", 0) <= len(log.events), "ranks may share memory"
    return len(log.events)


@BOTH_ORDERS
@distributed(4)
def test_groups_on_different_meshes_need_one_all_reduce(order: float) -> None:
    rank = dist.get_rank()
    dense, flat = numbers(0), numbers(1)
    expert = numbers(2, rank % 2)  # ranks 0 and 2 have one, 1 and 3 another
    modules = [fsdp(dense, cpu_mesh()), fsdp(flat, grid()), fsdp(expert, grid()["outer"])]
    params = [param for module in modules for param in module.parameters()]
    want = norm_of([dense, flat, numbers(2, 0), numbers(2, 1)], order)
    assert all_reduces(lambda: grad_norm(params, order)) == 1
    torch.testing.assert_close(grad_norm(params, order), want)
    clip_grad_norm_(params, 0.5, order)
    for module, gradient in zip(modules, (dense, flat, expert), strict=True):
        (param,) = module.parameters()
        assert isinstance(param.grad, DTensor)
        torch.testing.assert_close(param.grad.full_tensor(), gradient * 0.5 / (want + 1e-6))


@BOTH_ORDERS
@distributed(2, 4, matrix=[4])
def test_plain_parameters_are_the_same_on_all_ranks_and_count_once(order: float) -> None:
    gradients = [numbers(0), numbers(1) * 10]
    module = fsdp(gradients[0], cpu_mesh())
    plain = _plain(gradients[1])
    params = [*module.parameters(), plain]
    want = norm_of(gradients, order)
    torch.testing.assert_close(clip_grad_norm_(params, 0.5, order), want)
    torch.testing.assert_close(plain.grad, gradients[1] * 0.5 / (want + 1e-6))


def _plain(gradient: torch.Tensor) -> nn.Parameter:
    """A parameter that is whole, and the same, on every rank."""
    param = nn.Parameter(torch.zeros_like(gradient))
    param.grad = gradient.clone()
    return param


def _tensor_parallel(*gradients: torch.Tensor) -> list[nn.Parameter]:
    mesh = grid()
    return [
        parameter(gradients[0], mesh, Shard(0), Shard(1)),
        parameter(gradients[1], mesh, Shard(0), Replicate()),
        parameter(gradients[2], mesh, Replicate(), Replicate()),
        *fsdp(gradients[3], mesh["outer"]).parameters(),  # tensor parallel ranks hold copies
    ]


def _none_holds_the_others(*gradients: torch.Tensor) -> list[nn.Parameter]:
    mesh = grid()
    sharded = parameter(gradients[1], mesh["inner"], Shard(0))
    return [*fsdp(gradients[0], mesh["outer"]).parameters(), sharded]


def _plain_beside_several(*gradients: torch.Tensor) -> list[nn.Parameter]:
    modules = [fsdp(gradients[0], cpu_mesh()), fsdp(gradients[1], grid())]
    return [_plain(gradients[2]), *(param for each in modules for param in each.parameters())]


@BOTH_ORDERS
@pytest.mark.parametrize(
    ("count", "make"),
    [(4, _tensor_parallel), (2, _none_holds_the_others), (3, _plain_beside_several)],
)
@distributed(4)
def test_each_parameter_counts_by_its_placements_in_one_all_reduce(
    count: int, make: Callable[..., list[nn.Parameter]], order: float
) -> None:
    gradients = [numbers(seed) for seed in range(count)]
    params = make(*gradients)
    assert all_reduces(lambda: grad_norm(params, order)) == 1
    torch.testing.assert_close(grad_norm(params, order), norm_of(gradients, order))


@distributed(2)
def test_plain_parameters_alone_need_no_collective() -> None:
    plain = nn.Linear(3, 2)
    plain(torch.ones(1, 3)).sum().backward()
    want = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert all_reduces(lambda: torch.testing.assert_close(grad_norm(plain), want)) == 0


@BOTH_ORDERS
@distributed(4)
def test_a_stage_of_a_pipeline_has_its_own_norm_and_a_group_joins_the_stages(order: float) -> None:
    mesh = grid()
    stage = mesh.get_local_rank("outer")
    module = fsdp(numbers(stage), mesh["inner"])
    alone = grad_norm(module, order)
    torch.testing.assert_close(alone, norm_of([numbers(stage)], order))
    if dist.get_rank() < 2:  # the other stage need not take part
        grad_norm(module, order)
    whole = norm_of([numbers(0), numbers(1)], order)
    world = dist.group.WORLD
    assert all_reduces(lambda: grad_norm(module, order, process_group=world)) == 1
    torch.testing.assert_close(clip_grad_norm_(module, 0.5, order, process_group=world), whole)
    (param,) = module.parameters()
    assert isinstance(param.grad, DTensor)
    torch.testing.assert_close(param.grad.full_tensor(), numbers(stage) * 0.5 / (whole + 1e-6))


@distributed(4)
def test_ranks_for_which_torch_has_no_group_get_one_once() -> None:
    half = cpu_mesh((2, 2, 1), ("stage", "shard", "tensor"))
    stage = half.get_local_rank("stage")
    mesh = half["shard", "tensor"]
    gradients = [numbers(stage, 0), numbers(stage, 1)]
    params = [
        parameter(gradients[0], mesh, Shard(0), Shard(1)),
        parameter(gradients[1], mesh, Shard(1), Replicate()),
    ]
    norms = [grad_norm(params) for _ in range(3)]
    torch.testing.assert_close(norms[-1], norm_of(gradients, 2.0))
    assert all_reduces(lambda: grad_norm(params)) == 1


@distributed(2, 4)
def test_a_model_whose_gradients_only_some_ranks_hold_is_clipped_on_all(world_size: int) -> None:
    gradient = numbers(0, shape=(1, 3))  # the first rank holds the only row
    module = fsdp(gradient, cpu_mesh())
    torch.testing.assert_close(clip_grad_norm_(module, 0.5), gradient.norm())
    assert_equal(
        gradients_of(module),
        {"weight": gradient * 0.5 / (gradient.norm() + 1e-6)},
        rounding(world_size),
        "gradients",
    )
