"""Meshes of several axes: hybrid, several that act as one, replicas only, and a mesh per group.

The reference is the unsharded model on the whole batch; torch's own runs on the same inputs where
it takes them (with ``dp_mesh_dims`` it takes no plain parameters).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.comm import EventKind, EventLog, observe
from fullshard.sharding import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    fully_shard,
)
from support.apart import private_memory
from support.modules import Assembled, in_turn
from support.parity.compare import (
    EXACT,
    Tensors,
    assert_equal,
    gradients_of,
    mean_over_ranks,
    parameters_of,
    rounding,
)
from support.parity.engines import OURS, TORCH, shard
from support.parity.models import CASES, build
from support.parity.reference import compare, my_rows, train, whole_batch
from support.products import few
from support.ranks import cpu_mesh, distributed

# torch warns of outputs that are views, such as those of a linear layer given three dimensions.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

AXES = ("dp_replicate", "dp_shard", "cp")
TORCHS: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
Dims = DataParallelMeshDims


def _counts(log: EventLog) -> dict[str, int]:
    kinds = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
    return {str(kind): len(log.of(kind)) for kind in kinds}


# -- axes by name ---------------------------------------------------------------------------------

MESHES = {
    "shard and replicate": ((2, 2), ("out", "in"), Dims(shard="in", replicate="out")),
    "shard outside": ((2, 2), ("out", "in"), Dims(shard="out", replicate="in")),
    "one shards": ((4, 1), ("dp", "tp"), Dims(shard="dp")),
    "two shard": ((1, 2, 2), AXES, Dims(shard=("dp_shard", "cp"))),
    "two shard, one replicates": (
        (2, 2, 1),
        AXES,
        Dims(shard=("dp_shard", "cp"), replicate="dp_replicate"),
    ),
    "one shards, two replicate": ((2, 2, 1), ("a", "b", "c"), Dims(shard="b", replicate="a")),
    "inner shards, two replicate": (
        (2, 1, 2),
        ("a", "b", "c"),
        Dims(shard="c", replicate=("a", "b")),
    ),
    "outer shards, two replicate": (
        (2, 1, 2),
        ("a", "b", "c"),
        Dims(shard="a", replicate=("b", "c")),
    ),
    "two replicate": ((2, 2), ("a", "b"), Dims(replicate=("a", "b"))),
    "a list of names": ((2, 2), ("a", "b"), Dims(shard=["a", "b"])),  # type: ignore[arg-type]  # as a configuration file gives it
}

# Each kind of axes once; the rest of them is in the matrix.
FEW = {
    "shard and replicate",
    "two shard",
    "two shard, one replicates",
    "inner shards, two replicate",
    "two replicate",
}


@pytest.mark.device(paces=True)
@pytest.mark.parametrize("which", few(MESHES, *FEW))
@distributed(4)
def test_named_axes_train_as_the_unsharded_model_does(which: str) -> None:
    shape, names, dims = MESHES[which]
    case = CASES["uneven"]
    model = shard(case, mesh=cpu_mesh(shape, names), dp_mesh_dims=dims)
    got = train(model, case, my_rows(), steps=3)
    want = train(build(case), case, whole_batch, steps=3)
    compare(got, want, rounding(4))


@distributed(4)
def test_several_axes_that_shard_equal_one_axis_to_the_last_bit() -> None:
    case = CASES["uneven"]
    dims = Dims(shard=("dp_shard", "cp"))
    several = shard(case, mesh=cpu_mesh((1, 2, 2), AXES), dp_mesh_dims=dims)
    one = shard(case)
    logs = []
    runs = []
    for model in (several, one):
        log = EventLog()
        with observe(log):
            runs.append(train(model, case, my_rows(), steps=2))
        logs.append(_counts(log))
    compare(runs[0], runs[1], EXACT, average=False, grow=False)
    assert logs[0] == logs[1]


@distributed(4)
def test_flattened_axes_are_those_that_the_user_may_have_flattened_before() -> None:
    mesh = cpu_mesh((1, 2, 2), AXES)
    dims = Dims(shard=("dp_shard", "cp"))
    made: Any = [fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=dims) for _ in range(2)]
    flat, again = (model.weight.device_mesh for model in made)
    assert flat.mesh_dim_names == ("dp_shard_cp",)
    assert flat.size() == 4
    assert again.get_group() is flat.get_group()


# -- hybrid against torch -------------------------------------------------------------------------


@pytest.mark.cross
@pytest.mark.parametrize(
    "name",
    few(["uneven", "transformer", "lora", "twice"], "uneven"),
)
@pytest.mark.parametrize("reshard", [True, None, 2])
@distributed(4)
def test_a_hybrid_mesh_equals_torch(name: str, reshard: bool | int | None) -> None:
    mesh = cpu_mesh((2, 2), ("replicate", "shard"))
    runs = []
    for engine in (OURS, TORCH):
        model = shard(CASES[name], engine, mesh=mesh, reshard_after_forward=reshard)
        runs.append(train(model, CASES[name], my_rows(), steps=3))
    compare(runs[0], runs[1], rounding(4), average=False)


@distributed(4)
def test_a_hybrid_step_gathers_and_reduces_inside_and_averages_across() -> None:
    mesh = cpu_mesh((2, 2), ("replicate", "shard"))
    case = CASES["uneven"]
    model: Any = shard(case, mesh=mesh, reshard_after_forward=False)
    inputs, targets = case.batch(0, torch.float32)
    log = EventLog()
    with observe(log):
        case.loss(model(inputs), targets).backward()
    # three groups of its own; the root has no parameters left
    assert _counts(log) == {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 3}
    log.clear()
    model.set_requires_all_reduce(False)
    with observe(log):
        case.loss(model(inputs), targets).backward()
    assert _counts(log) == {"all_gather": 3, "reduce_scatter": 3, "all_reduce": 0}


@pytest.mark.parametrize("private", [False, True])
@distributed(4)
def test_all_ranks_average_across_at_the_same_place_among_their_reductions(private: bool) -> None:
    """Whoever finds a reduction over sooner must not launch sooner: others might wait for it."""
    case = CASES["uneven"]
    with private_memory() if private else nullcontext():
        model: Any = shard(case, mesh=cpu_mesh((2, 2), ("replicate", "shard")))
        for number in range(3):
            inputs, targets = case.batch(number, torch.float32)
            log = EventLog()
            with observe(log):
                case.loss(model(inputs), targets).backward()
            kinds = (EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)
            order = [(each.kind, each.name) for each in log.events if each.kind in kinds]
            names = list(dict.fromkeys(name for _, name in order))
            assert len(names) == 3 and order == [(kind, name) for name in names for kind in kinds]


# -- a mesh per group -----------------------------------------------------------------------------


def _expert() -> Any:
    """A layer of its own, beside one that all tokens pass."""
    return Assembled(
        lambda m, x: x + m.down(torch.tanh(m.up(torch.tanh(m.router(x))))),
        router=nn.Linear(6, 6),
        up=nn.Linear(6, 5),
        down=nn.Linear(5, 6, bias=False),
    )


def _model() -> Any:
    """Two such blocks and a head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        blocks = nn.Sequential(*(_expert() for _ in range(2)))
        return in_turn(blocks=blocks, head=nn.Linear(6, 1))


def _is_expert(name: str) -> bool:
    return ".up." in name or ".down." in name


def _experts_on(
    engine: Callable[..., Any],
    module: Any,
    mesh: DeviceMesh,
    result: Callable[[], Any],
    **options: Any,
) -> Any:
    """The model, whose experts are placed as ``result()`` says and the rest over ``mesh``."""
    place = result()
    for block in module.blocks:
        experts = {id(p) for p in (block.up.weight, block.up.bias, block.down.weight)}
        engine(
            block,
            mesh=mesh,
            shard_placement_fn=lambda p, experts=experts: place if id(p) in experts else None,
            **options,
        )
    return engine(module, mesh=mesh, **options)


def _batch() -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(11))


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(model(x).square().mean())


def _mean_over(model: nn.Module, ranks: list[int]) -> dict[str, torch.Tensor]:
    """The mean, over the parts of the batch that ``ranks`` see, of the gradients of a model."""
    totals: dict[str, torch.Tensor] = {}
    for rank in ranks:
        model.zero_grad()
        _loss(model, _batch()[my_rows(rank, 4)]).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            totals[name] = totals.get(name, 0) + param.grad / len(ranks)
    return totals


def _theirs(placement: Shard | None, mesh_info: Any) -> Any:
    """Torch's placement on a mesh of its own, or None if this torch has none."""
    kind = getattr(TORCHS, "ShardPlacementResult", None)
    return None if kind is None else kind(placement, mesh_info)


def _mesh_infos() -> dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]]:
    """Per kind: our placement, torch's, and the ranks over which such gradients are averaged."""
    mesh = cpu_mesh((2, 2), ("out", "in"))
    row = mesh["in"].mesh.tolist()
    return {
        "sharded inside": (
            lambda: ShardPlacementResult(None, FSDPMeshInfo(mesh["in"], 0)),
            lambda: _theirs(None, TORCHS.FSDPMeshInfo(mesh["in"], shard_mesh_dim=0)),
            lambda: row,
        ),
        "hybrid": (
            lambda: ShardPlacementResult(Shard(0), HSDPMeshInfo(mesh, 1, 0)),
            lambda: _theirs(
                Shard(0), TORCHS.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
            ),
            lambda: [0, 1, 2, 3],
        ),
        "replicated": (
            lambda: ShardPlacementResult(None, DDPMeshInfo(cpu_mesh())),
            lambda: None,
            lambda: [0, 1, 2, 3],
        ),
    }


@pytest.mark.cross
@pytest.mark.parametrize("reshard", few([True, 2, False, None], True, 2))
@pytest.mark.parametrize("kind", ["sharded inside", "hybrid", "replicated"])
@distributed(4)
def test_groups_of_one_module_on_their_own_meshes_have_their_own_means(
    kind: str, reshard: bool | int | None
) -> None:
    ours, theirs, ranks = _mesh_infos()[kind]
    runs: list[Tensors] = []
    for engine, result in ((fully_shard, ours), (TORCH.fully_shard, theirs)):
        if result() is None:
            continue
        if reshard == 2 and engine is TORCH.fully_shard and kind == "sharded inside":
            continue  # torch makes process groups that not all ranks of the world agree on
        model = _experts_on(engine, _model(), cpu_mesh(), result, reshard_after_forward=reshard)
        for _ in range(2):
            model.zero_grad()
            loss = _loss(model, _batch()[my_rows()])
            loss.backward()
        runs.append(gradients_of(model))
    wanted = _mean_over(_model(), [0, 1, 2, 3])
    experts = _mean_over(_model(), ranks())
    wanted |= {name: grad for name, grad in experts.items() if _is_expert(name)}
    for run in runs:
        assert_equal(run, wanted, rounding(4), kind)
    assert_equal(
        {"loss": mean_over_ranks(loss)}, {"loss": _loss(_model(), _batch())}, rounding(4), ""
    )


@pytest.mark.skipif(
    not hasattr(TORCHS, "ShardPlacementResult"), reason="this torch has one mesh per module"
)
@distributed(4)
def test_groups_of_one_module_have_as_many_collectives_as_torchs() -> None:
    inside = cpu_mesh((2, 2), ("out", "in"))["in"]
    result = ShardPlacementResult(None, FSDPMeshInfo(inside))
    mine = _experts_on(fully_shard, _model(), cpu_mesh(), lambda: result)
    log = EventLog()
    with observe(log):
        _loss(mine, _batch()[my_rows()]).backward()
    their_result = _theirs(None, TORCHS.FSDPMeshInfo(inside, shard_mesh_dim=0))
    theirs = _experts_on(TORCH.fully_shard, _model(), cpu_mesh(), lambda: their_result)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _loss(theirs, _batch()[my_rows()]).backward()
    names = [event.name for event in profile.events()]
    gathers = sum(name.startswith("gloo:all_gather") for name in names)
    # gloo of old reduce-scatters by an all-reduce, and says so
    reductions = sum(name.startswith(("gloo:reduce_scatter", "gloo:all_reduce")) for name in names)
    counts = {"all_gather": gathers, "reduce_scatter": reductions, "all_reduce": 0}
    assert _counts(log) == counts


# -- experts in parallel --------------------------------------------------------------------------


def _run_mixture(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Even tokens go to the first expert, odd ones to the second; ``[tokens, 6]``, in and out."""
    x = torch.tanh(m.inlet(x))
    out = torch.stack([m.experts[0](x[0::2]), m.experts[1](x[1::2])], dim=1)
    return m.head(torch.tanh(out.flatten(0, 1)))


def _mixture() -> Any:
    torch.manual_seed(5)
    experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    return Assembled(_run_mixture, inlet=nn.Linear(6, 6), experts=experts, head=nn.Linear(6, 1))


def _parallel_mixture(pair: dist.ProcessGroup) -> Any:
    """The same on a pair of ranks, of which each has one expert."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(m.inlet(x))
        by_expert = torch.cat([x[0::2], x[1::2]])
        mine = all_to_all_single_autograd(by_expert, None, None, pair)
        back = all_to_all_single_autograd(m.expert(mine), None, None, pair)
        return m.head(torch.tanh(torch.stack(back.chunk(2), dim=1).flatten(0, 1)))

    whole = _mixture()
    expert = whole.experts[pair.rank()]
    return Assembled(run, inlet=whole.inlet, expert=expert, head=whole.head)


@distributed(4)
def test_experts_in_parallel_train_as_the_unsharded_mixture() -> None:
    """The experts are sharded over the ranks that hold the same one, the rest over all."""
    mesh = cpu_mesh((2, 2), ("expert_data", "expert"))
    whole, model = _mixture(), _parallel_mixture(mesh["expert"].get_group())
    experts = set(model.expert.parameters())
    over = ShardPlacementResult(None, FSDPMeshInfo(mesh["expert_data"]))
    fully_shard(model, mesh=cpu_mesh(), shard_placement_fn=lambda p: over if p in experts else None)
    # An expert's tokens come from all ranks of both pairs, so its mean is over those, too.
    model.set_gradient_divide_factor(4.0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model.expert, model.head)]
    reference = torch.optim.SGD(
        [*whole.experts.parameters(), *whole.head.parameters()], lr=0.1, foreach=False
    )
    which = mesh["expert"].get_local_rank()
    for step in range(3):
        batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        _loss(whole, batch).backward()
        _loss(model, batch[dist.get_rank() * 4 : dist.get_rank() * 4 + 4]).backward()
        for mine, theirs in (
            (model.expert, whole.experts[which]),
            (model.inlet, whole.inlet),
            (model.head, whole.head),
        ):
            assert_equal(gradients_of(mine), gradients_of(theirs), rounding(4), f"step {step}")
        for optimizer in (*optimizers, reference):
            optimizer.step()
        model.zero_grad()
        whole.zero_grad()
    assert model.expert.weight.to_local().shape == (3, 6)
    want = parameters_of(whole.experts[which])
    assert_equal(parameters_of(model.expert), want, rounding(4, steps=3), "expert")
