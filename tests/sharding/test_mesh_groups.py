"""Several groups of one module, each on a mesh of its own: agreement, setters, threads as ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fullshard.comm import EventKind, EventLog, observe
from fullshard.sharding import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    RankMismatchError,
    ShardedState,
    ShardPlacementResult,
    fully_shard,
    share_comm_ctx,
)
from fullshard.sharding.hooks.lookup import the_state
from support.collectives import ToldAllGather
from support.events.recorder import assert_all_returned
from support.modules import Assembled
from support.parity.compare import assert_equal, gradients_of, rounding
from support.ranks import cpu_mesh, distributed
from support.surface.ranks import everyone, never_gathered
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads

TIMEOUT = 20.0  # seconds: a rank that is left waiting must not hold up the run for long


def _net(hidden: int = 5) -> Any:
    """A layer for all, and one whose parameters go elsewhere."""
    net = Assembled(
        lambda m, x: m.common(x) + m.expert(x),
        common=nn.Linear(4, 4),
        expert=nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 4)),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return net


def _inside() -> FSDPMeshInfo:
    return FSDPMeshInfo(cpu_mesh((2, 2), ("out", "in"))["in"])


def _on_meshes(net: Any, mesh_info: FSDPMeshInfo, **arguments: Any) -> Any:
    experts = set(net.expert.parameters())
    result = ShardPlacementResult(None, mesh_info)
    return fully_shard(
        net,
        mesh=cpu_mesh(),
        shard_placement_fn=lambda param: result if param in experts else None,
        **arguments,
    )


def _rows(rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 + rank))


def _step(net: nn.Module) -> None:
    net(_rows(dist.get_rank())).square().sum().backward()


def _means(ranks: list[int], factor: float | None = None) -> dict[str, torch.Tensor]:
    net = _net()
    for rank in ranks:
        net(_rows(rank)).square().sum().backward()
    return {name: param.grad / (factor or len(ranks)) for name, param in net.named_parameters()}


def _wanted(factor: float | None = None) -> dict[str, torch.Tensor]:
    inside = cpu_mesh((2, 2), ("out", "in"))["in"].mesh.tolist()
    wanted, experts = _means([0, 1, 2, 3], factor), _means(inside, factor)
    return wanted | {name: grad for name, grad in experts.items() if "expert" in name}


# -- what ranks must agree on ---------------------------------------------------------------------


def _mismatch(net: nn.Module) -> str:
    log = EventLog()
    with observe(log), pytest.raises(RankMismatchError) as caught:
        net(torch.ones(1, 4))
    assert never_gathered(log)
    return str(caught.value)


@distributed(4, timeout=TIMEOUT)
def test_a_parameter_that_differs_on_its_own_mesh_raises_on_every_rank() -> None:
    """Ranks 2 and 3 share the experts that differ; 0 and 1 would wait for them."""
    net = _on_meshes(_net(6 if dist.get_rank() == 3 else 5), _inside())
    messages = everyone(_mismatch(net))
    assert len(set(messages)) == 1
    assert "rank 2 has expert.0.weight: shape (5, 4)" in messages[0]
    assert "rank 3 has expert.0.weight: shape (6, 4)" in messages[0]


@distributed(4, timeout=TIMEOUT)
def test_a_rank_without_the_parameters_of_the_other_mesh_raises_on_every_rank() -> None:
    net = _net()
    if dist.get_rank() == 3:
        net.expert = nn.Identity()
    message = _mismatch(_on_meshes(net, _inside()))
    assert "parameter group '(root) on in' sharded over 2 ranks" in message
    assert len(set(everyone(message))) == 1


@distributed(4, timeout=TIMEOUT)
def test_experts_that_differ_between_slices_of_the_mesh_are_no_mismatch() -> None:
    net = _on_meshes(_net(7 if dist.get_rank() >= 2 else 5), _inside())
    _step(net)
    assert net.expert[0].weight.grad.shape[0] == (7 if dist.get_rank() >= 2 else 5)


@distributed(4, timeout=TIMEOUT)
def test_another_mesh_on_one_rank_raises_on_every_rank() -> None:
    mesh = cpu_mesh((2, 2), ("out", "in"))
    odd = dist.get_rank() == 1
    info = HSDPMeshInfo(mesh) if odd else FSDPMeshInfo(mesh["in"])
    messages = everyone(_mismatch(_on_meshes(_net(), info)))
    assert len(set(messages)) == 1
    assert "sharded over 2 ranks with 2 replicas" in messages[0]


@distributed(4, timeout=TIMEOUT)
def test_an_error_of_one_rank_raises_on_every_rank_of_every_mesh() -> None:
    net = _net()
    if dist.get_rank() == 2:
        net.expert[2].to("meta")
    messages = everyone(_mismatch(_on_meshes(net, _inside())))
    assert len(set(messages)) == 1
    assert "expert.2.weight" in messages[0]
    assert "rank 2" in messages[0]


# -- methods --------------------------------------------------------------------------------------


@distributed(4)
def test_unshard_and_reshard_take_every_group() -> None:
    net = _on_meshes(_net(), _inside())
    handle = net.unshard(async_op=True)
    handle.wait()
    groups = the_state(net).own_groups
    assert [group.state for group in groups] == [ShardedState.UNSHARDED] * 2
    plain = _net()
    for name, param in net.named_parameters():
        assert torch.equal(param, plain.get_parameter(name))
    net.reshard()
    assert_all_returned(net)


@distributed(4)
def test_accumulation_and_its_setters_take_every_group() -> None:
    net = _on_meshes(_net(), _inside())
    net.set_requires_gradient_sync(False)
    _step(net)
    assert all(param.grad is None for param in net.parameters())
    net.set_requires_gradient_sync(True)
    _step(net)
    wanted = {name: 2 * grad for name, grad in _wanted().items()}
    assert_equal(gradients_of(net), wanted, rounding(4), "gradients")


@distributed(4)
def test_the_all_reduce_of_the_groups_that_have_one_can_be_left_out() -> None:
    mesh = cpu_mesh((2, 2), ("out", "in"))
    net = _on_meshes(_net(), HSDPMeshInfo(mesh))
    log = EventLog()
    with observe(log):
        net.set_requires_all_reduce(False)
        _step(net)
        assert log.of(EventKind.ALL_REDUCE) == []
        assert net.expert[0].weight.grad is None
        assert net.common.weight.grad is not None
        net.set_requires_all_reduce(True)
        _step(net)
    assert log.named(EventKind.ALL_REDUCE) == ["(root) on outxin"]
    wanted = {name: 2 * grad for name, grad in _means([0, 1, 2, 3]).items()}
    assert_equal(gradients_of(net), wanted, rounding(4), "gradients")


@distributed(4)
def test_a_custom_all_gather_is_given_each_groups_ranks() -> None:
    """Torch refuses one where a module has several groups; it is told which group it is for."""
    sizes: list[int] = []
    comm = ToldAllGather(lambda output, group: sizes.append(group.size()))
    net = _on_meshes(_net(), _inside())
    net.set_custom_all_gather(comm)
    _step(net)
    assert sorted(sizes) == [2, 4]


@distributed(4)
def test_other_settings_of_collectives_take_every_group() -> None:
    net = _on_meshes(_net(), _inside())
    net.set_gradient_divide_factor(3.0)
    net.set_separate_reduce_scatter_group()
    net.set_force_sum_reduction_for_comms(True)
    net.set_reduce_scatter_max_input_buffers(1)
    net.set_reduce_scatter_unused_params(True)
    net.set_reshard_after_forward(True)
    net.set_reshard_after_backward(False)
    _step(net)
    assert [group.state for group in the_state(net).own_groups] == [ShardedState.UNSHARDED] * 2
    net.reshard()
    assert_equal(gradients_of(net), _wanted(3.0), rounding(4), "gradients")


@distributed(4)
def test_stages_with_several_groups_share_streams() -> None:
    stages = [_on_meshes(_net(), _inside()) for _ in range(2)]
    share_comm_ctx(stages)
    contexts = [the_state(stage).context for stage in stages]
    assert contexts[0].shared.streams is contexts[1].shared.streams
    for stage in stages:
        _step(stage)
        assert_equal(gradients_of(stage), _wanted(), rounding(4), "gradients")


@distributed(4)
def test_state_dicts_of_a_module_with_several_groups_are_whole_and_load() -> None:
    net = _on_meshes(_net(), _inside())
    plain = _net()
    state = net.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name].full_tensor(), value)
    changed = {name: value + 1 for name, value in plain.state_dict().items()}
    net.load_state_dict(changed)
    net.unshard()
    for name, param in net.named_parameters():
        assert torch.equal(param, changed[name])
    net.reshard()


@distributed(4)
def test_groups_whose_meshes_share_a_process_group_or_a_name_stay_apart() -> None:
    mesh, other = cpu_mesh((2, 2), ("a", "b")), cpu_mesh((2, 1, 2), ("x", "y", "b"))
    net = _net()
    places: dict[nn.Parameter, Any] = {
        net.expert[0].weight: FSDPMeshInfo(mesh["b"]),
        net.expert[0].bias: FSDPMeshInfo(other["b"]),
        net.expert[2].weight: DDPMeshInfo(mesh["a"]),
        net.expert[2].bias: HSDPMeshInfo(mesh),
    }
    fully_shard(
        net,
        mesh=cpu_mesh(),
        shard_placement_fn=lambda p: ShardPlacementResult(None, places[p]) if p in places else None,
    )
    assert net.expert[2].weight.placements == (Replicate(),)
    _step(net)
    names = [group.name for group in the_state(net).own_groups]
    assert names == [
        "(root)",
        "(root) on b",
        "(root) on b #2",
        "(root) on a",
        "(root) on axb",
    ]
    wanted = _means([0, 1, 2, 3])
    inside, outside = (_means(mesh[axis].mesh.tolist()) for axis in ("b", "a"))
    for name, means in (("0.weight", inside), ("0.bias", inside), ("2.weight", outside)):
        wanted[f"expert.{name}"] = means[f"expert.{name}"]
    assert_equal(gradients_of(net), wanted, rounding(4), "gradients")


@distributed(4)
def test_a_copy_cut_along_another_dim_on_another_mesh() -> None:
    net = _net()
    wide = net.expert[0].weight
    place = ShardPlacementResult(Shard(-1), _inside())
    fully_shard(
        net,
        mesh=cpu_mesh(),
        shard_placement_fn=lambda param: place if param is wide else Shard(0),
    )
    assert net.expert[0].weight.placements == (Shard(1),)
    assert net.expert[0].weight.to_local().shape == (5, 2)
    _step(net)
    inside = _wanted()["expert.0.weight"]
    wanted = _means([0, 1, 2, 3]) | {"expert.0.weight": inside}
    assert_equal(gradients_of(net), wanted, rounding(4), "gradients")


# -- a wide world ---------------------------------------------------------------------------------

WORLD = 8


def _trained(rank: ThreadRank, net: Any, kind: str) -> list[torch.Tensor]:
    """Three steps on a (2, 2, 2) mesh; the whole parameters after them."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("out", "mid", "in"))
    own: Any = copy.deepcopy(net)
    dims = DataParallelMeshDims(shard=("mid", "in"), replicate="out")
    if kind == "replicated":
        dims = DataParallelMeshDims(replicate=("out", "mid", "in"))
    fully_shard(own, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        own(_part(step, rank.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor() for param in own.parameters()]


def _part(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("kind", ["hybrid", "replicated"])
def test_eight_ranks_on_three_axes_train_as_the_unsharded_model(kind: str) -> None:
    net = _net()
    results = run_program_on_threads(_trained, WORLD, net, kind)
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        whole = torch.cat([_part(step, rank) for rank in range(WORLD)])
        plain(whole).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for result in results:
        for got, want in zip(result, plain.parameters(), strict=True):
            torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)
