"""``replicate``: parameters stay whole, gradients are averaged, and unsharding sends nothing.

The reference is the unsharded model on the whole batch, and torch's own ``replicate`` on the same
inputs.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import (
    DataParallelMeshDims,
    FSDPModule,
    RankMismatchError,
    ReplicateModule,
    ShardedState,
    fully_shard,
    replicate,
)
from support.apart import private_memory
from support.events.recorder import group_of
from support.parity.compare import EXACT, assert_equal, gradients_of, rounding
from support.parity.engines import Engine, shard, tell
from support.parity.models import CASES, build
from support.parity.reference import ByHand, compare, my_rows, train, whole_batch
from support.products import few
from support.ranks import cpu_mesh, distributed

# torch warns of outputs that are views, such as those of a linear layer given three dimensions.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

THEIRS: Any = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
OURS = Engine(fully_shard=replicate, mixed=MixedPrecisionPolicy)
TORCH = Engine(
    fully_shard=THEIRS.replicate,
    mixed=importlib.import_module("torch.distributed.fsdp").MixedPrecisionPolicy,
)
NAMES = sorted(CASES.keys() - {"empty", "one-group", "many-dtypes"})


@pytest.mark.parametrize("name", ["replicate", "replicate_with_fsdp"])
@distributed(2)
def test_torchs_own_around_a_model_with_sharded_children_leaves_those_to_us(name: str) -> None:
    around = importlib.import_module(f"torch.distributed._composable.{name}").replicate
    torch.manual_seed(0)
    whole: Any = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    model = copy.deepcopy(whole)
    fully_shard(model[1], mesh=cpu_mesh())
    around(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    for step in range(2):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(batch.chunk(2)[dist.get_rank()]).square().mean().backward()
        whole(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(model[1][0].weight, DTensor)
    for mine, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        full = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(full.detach(), wanted.detach())


@pytest.mark.parametrize("name", NAMES)
@distributed(2)
def test_training_equals_that_of_the_unsharded_model(name: str) -> None:
    case = CASES[name]
    if name == "batch-norm":
        reference = ByHand(case, dist.get_world_size())
        model = shard(case, OURS)
        inputs, targets = case.batch(0, torch.float32)
        case.loss(model(inputs[my_rows()]), targets[my_rows()]).backward()
        reference.backward(0)
        want = gradients_of(reference.masters)
        assert_equal(gradients_of(model), want, rounding(2), "gradients")
        return
    got = train(shard(case, OURS), case, my_rows(), steps=3)
    compare(got, train(build(case), case, whole_batch, steps=3), rounding(2))


@pytest.mark.parametrize("name", few(["uneven", "transformer", "lora", "twice"], "uneven", "lora"))
@distributed(2)
def test_training_equals_torchs_replicate_to_the_last_bit(name: str) -> None:
    runs = []
    for engine in (OURS, TORCH):
        model = shard(CASES[name], engine)
        runs.append(train(model, CASES[name], my_rows(), steps=3))
    compare(runs[0], runs[1], EXACT, average=False, grow=False)


@distributed(2)
def test_mixed_precision_and_accumulation_equal_their_definition() -> None:
    case = CASES["transformer"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(case, OURS, mp_policy=policy)
    reference = ByHand(case, 2, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rows = my_rows()
    for step in range(3):
        tell(model, "set_requires_gradient_sync", step == 2)
        inputs, targets = case.batch(step, torch.float32)
        case.loss(model(inputs[rows]), targets[rows]).backward()
        reference.backward(step, synchronise=step == 2)
    assert_equal(gradients_of(model), gradients_of(reference.masters), EXACT, "gradients")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the counter's own hooks
@distributed(2)
def test_a_step_sends_one_all_reduce_per_group_and_nothing_else() -> None:
    case = CASES["uneven"]
    model: Any = shard(case, OURS)
    inputs, targets = case.batch(0, torch.float32)
    case.loss(model(inputs), targets).backward()  # ranks agree once
    for synchronise, expected in ((True, 3), (False, 0)):
        model.set_requires_gradient_sync(synchronise)
        with private_memory(), CommDebugMode() as sent:  # it sees what the process group moves
            loss = case.loss(model(inputs), targets)
            assert sent.get_total_counts() == 0
            loss.backward()
        counts = {str(op): count for op, count in sent.get_comm_counts().items() if count}
        assert sum(counts.values()) == expected
        assert all("allreduce" in op for op in counts), counts


@distributed(2)
def test_all_reduces_run_while_backward_goes_on() -> None:
    model: Any = shard(CASES["uneven"], OURS)
    inputs, targets = CASES["uneven"].batch(0, torch.float32)
    log = EventLog()
    with observe(log):
        CASES["uneven"].loss(model(inputs.requires_grad_()), targets).backward()
    kinds = (EventKind.PRE_BACKWARD, EventKind.ALL_REDUCE)
    order = [f"{event.kind} {event.name}" for event in log.of(*kinds)]
    assert order.index("all_reduce last") < order.index("pre_backward first")


@distributed(2)
def test_parameters_are_whole_and_replicated_as_torchs_are() -> None:
    shapes = []
    for engine in (OURS, TORCH):
        model: Any = shard(CASES["uneven"], engine)
        for param in model.parameters():
            assert isinstance(param, DTensor)
            assert list(param.placements) == [Replicate()]
            assert param.to_local().shape == param.shape
            shapes.append(param.device_mesh)
    assert len(set(shapes)) == 1
    default: Any = replicate(nn.Linear(3, 2))
    theirs: Any = THEIRS.replicate(nn.Linear(3, 2))
    assert default.weight.device_mesh.mesh_dim_names == theirs.weight.device_mesh.mesh_dim_names


@distributed(2)
def test_unsharded_copies_live_from_forward_to_backward() -> None:
    linear: Any = replicate(nn.Linear(3, 2))
    group = group_of(linear)
    states = [group.state]
    out = linear(torch.ones(1, 3))
    states.append(group.state)
    assert not isinstance(linear.weight, DTensor)
    out.sum().backward()
    sharded = ShardedState.SHARDED
    assert [*states, group.state] == [sharded, ShardedState.UNSHARDED, sharded]
    assert isinstance(linear.weight.grad, DTensor)
    assert list(linear.weight.grad.placements) == [Replicate()]


@distributed(2)
def test_the_class_is_a_sharded_modules_and_names_both() -> None:
    linear = replicate(nn.Linear(3, 2))
    assert isinstance(linear, ReplicateModule)
    assert isinstance(linear, FSDPModule)
    assert isinstance(linear, nn.Linear)
    assert type(linear).__name__ == "ReplicateLinear"
    several: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 3)]
    assert replicate(several) is several
    assert all(isinstance(each, ReplicateModule) for each in several)
    chain = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    replicate(chain)
    assert type(chain[:1]) is nn.Sequential
    assert not isinstance(fully_shard(nn.Linear(2, 2)), ReplicateModule)


@distributed(4)
def test_replicated_modules_live_under_a_sharded_root() -> None:
    case = CASES["uneven"]
    model: Any = build(case)
    replicate(model.first, mesh=cpu_mesh())
    fully_shard(model.second, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    assert model.first.weight.placements == (Replicate(),)
    assert model.last.weight.placements == (Shard(0),)
    inputs, targets = case.batch(0, torch.float32)
    case.loss(model(inputs[my_rows()]), targets[my_rows()]).backward()
    plain = build(case)
    case.loss(plain(inputs), targets).backward()
    assert_equal(gradients_of(model), gradients_of(plain), rounding(4), "gradients")


@pytest.mark.parametrize("function", [replicate, fully_shard])
@distributed(4)
def test_named_axes_of_a_larger_mesh_replicate(function: Any) -> None:
    mesh = cpu_mesh((2, 2, 1), ("a", "b", "c"))
    dims = DataParallelMeshDims(replicate=("a", "b"))
    linear = function(nn.Linear(3, 2), mesh=mesh, dp_mesh_dims=dims)
    assert linear.weight.placements == (Replicate(),)
    assert linear.weight.device_mesh.mesh_dim_names == ("a_b",)
    linear(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    assert torch.equal(linear.weight.grad.to_local(), torch.full((2, 3), 1.5))
    assert not group_of(linear).leases.out


# -- errors ---------------------------------------------------------------------------------------


@distributed(2)
def test_axes_that_shard_are_an_error_that_names_fully_shard() -> None:
    mesh = cpu_mesh((2, 1), ("dp", "tp"))
    for dims in ({"shard": "dp"}, {"shard": "tp", "replicate": "dp"}):
        with pytest.raises(ValueError, match=r"dp_mesh_dims.*fully_shard"):
            replicate(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))


@distributed(2)
def test_a_mesh_of_two_axes_is_an_error_that_says_to_pass_one() -> None:
    with pytest.raises(ValueError, match=r"2 dimensions.*replicate takes a 1-D mesh.*mesh\['dp'\]"):
        replicate(nn.Linear(2, 2), mesh=cpu_mesh((2, 1), ("dp", "tp")))


@distributed(2, timeout=20.0)
def test_replicas_that_differ_raise_on_every_rank_with_the_parameters_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2 + dist.get_rank()))
    with pytest.raises(RankMismatchError, match=r"0\.weight: shape \(2, 2\).*shape \(3, 2\)"):
        replicate(model)(torch.ones(1, 2))
