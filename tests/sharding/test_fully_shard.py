"""What ``fully_shard`` makes of a module: classes, parameters and their shards, buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fullshard.sharding import FSDPModule, fully_shard
from support.ranks import cpu_mesh, distributed
from support.surface.model import Block, Net, batch, build, sharded
from support.surface.ranks import everyone

# -- classes --------------------------------------------------------------------------------------


@distributed(2)
def test_the_class_is_named_after_the_original_and_is_both() -> None:
    net = sharded(build())
    assert type(net).__name__ == "FSDPNet"
    assert isinstance(net, FSDPModule)
    assert isinstance(net, Net)
    block = net.blocks[0]
    assert type(block).__name__ == "FSDPBlock"
    assert isinstance(block, FSDPModule)
    assert isinstance(block, Block)
    assert type(block) is type(net.blocks[1])
    assert type(net.stem) is nn.Linear
    assert repr(net).startswith("FSDPNet(") and "FSDPBlock(" in repr(net)
    assert repr(fully_shard(nn.Linear(2, 3))) == (
        "FSDPLinear(in_features=2, out_features=3, bias=True)"
    )


@distributed(2)
def test_the_same_object_comes_back_and_a_slice_of_a_sequential_is_plain() -> None:
    net: Any = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    assert fully_shard(net) is net
    part = net[:2]
    assert type(part) is nn.Sequential
    assert part[0] is net[0]
    several: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert fully_shard(several) is several
    assert all(isinstance(module, FSDPModule) for module in several)


# -- parameters -----------------------------------------------------------------------------------


@distributed(1, 2, 4)
def test_every_parameter_is_a_dtensor_cut_as_torch_chunk_cuts() -> None:
    plain, net = build(), sharded(build())
    rank, world = dist.get_rank(), dist.get_world_size()
    originals = dict(plain.named_parameters())
    for name, param in net.named_parameters():
        whole = originals[name].detach()
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter), name
        assert param.placements == (Shard(0),)
        assert param.device_mesh == cpu_mesh()
        assert param.shape == whole.shape
        assert param.stride() == whole.stride()
        chunks = torch.chunk(whole, world)
        mine = chunks[rank] if rank < len(chunks) else whole.new_empty((0, *whole.shape[1:]))
        assert torch.equal(param.to_local(), mine), name
        assert torch.equal(param.full_tensor(), whole), name


@distributed(2)
def test_the_shards_do_not_keep_the_full_memory_alive() -> None:
    net = sharded(build())
    for param in net.parameters():
        assert isinstance(param, DTensor)
        local = param.to_local()
        assert local.untyped_storage().nbytes() == local.numel() * local.element_size()


@distributed(2)
def test_attributes_survive_sharding_steps_and_moves_as_they_do_without_sharding() -> None:
    plain: Any = nn.Linear(2, 2)
    plain.weight.rule = "rows"
    assert plain.double().weight.rule == "rows"

    class Model(nn.Linear):
        flavour = "sweet"

        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self(x)

    net: Any = Model(2, 2)
    net.weight.rule = "rows"
    expected = net.twice(torch.ones(1, 2)).detach()
    fully_shard(net)
    assert net.flavour == "sweet" and net.weight.rule == "rows"
    assert torch.equal(net.twice(torch.ones(1, 2)), expected)
    net.bias.late = 1
    net.double()
    assert net.weight.rule == "rows"
    assert net.bias.late == 1
    net(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert net.weight.rule == "rows"


@distributed(2)
def test_ignored_parameters_stay_exactly_what_they_were() -> None:
    net = build()
    block: Any = net.blocks[0]
    ignored = {net.head.weight, block.fc1.bias}
    identities = {id(param) for param in ignored}
    sharded(net, ignored_params=ignored)
    assert {id(net.head.weight), id(block.fc1.bias)} == identities
    assert not isinstance(net.head.weight, DTensor)
    assert isinstance(net.head.bias, DTensor)
    reference = build()
    net(batch(dist.get_rank())).sum().backward()
    reference(batch(dist.get_rank())).sum().backward()
    assert torch.equal(net.head.weight.grad, reference.head.weight.grad)
    everyone_has = everyone(net.head.weight.grad)
    assert not torch.equal(everyone_has[0], everyone_has[1])


@distributed(2)
def test_ignored_parameters_on_another_device_are_not_moved() -> None:
    model = nn.Linear(3, 3)
    model.register_parameter("later", nn.Parameter(torch.zeros((), device="meta")))
    later: Any = model.later
    net = fully_shard(model, ignored_params={later})
    assert net.later is later
    assert net(torch.ones(1, 3)).shape == (1, 3)


@distributed(2)
def test_a_module_without_parameters_can_be_sharded_and_runs() -> None:
    tanh = fully_shard(nn.Tanh())
    x = torch.randn(2, 2, requires_grad=True)
    tanh(x).sum().backward()
    torch.testing.assert_close(x.grad, 1 - torch.tanh(x.detach()) ** 2)


@distributed(2, fresh=True)  # torch keeps the mesh
def test_a_mesh_equal_to_one_whose_process_group_is_gone_is_the_parameters_own() -> None:
    for last in (False, True):
        group = dist.new_group()
        mesh = DeviceMesh.from_group(group, "cpu")
        layer: Any = fully_shard(nn.Linear(3, 5), mesh=mesh)
        layer(torch.ones(2, 3)).sum().backward()
        for param in layer.parameters():
            assert param.device_mesh is mesh and param.grad.device_mesh is mesh
            assert param.full_tensor().shape == param.grad.full_tensor().shape
        if not last:
            dist.destroy_process_group(group)
    dist.destroy_process_group(group)
