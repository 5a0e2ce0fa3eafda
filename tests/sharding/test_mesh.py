"""What the engine reads from a mesh, what it refuses, what ``shard_placement_fn`` may return."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from fullshard.sharding import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    fully_shard,
    replicate,
)
from fullshard.sharding.mesh.mesh_axes import mesh_info_of
from fullshard.sharding.mesh.mesh_info import device_type_of
from support.collectives import ToldAllGather
from support.events.recorder import group_of
from support.ranks import cpu_mesh, distributed

TORCHS: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
TORCH_NAMES_AXES = hasattr(
    importlib.import_module("torch.distributed.fsdp"), "DataParallelMeshDims"
)
TORCH_PLACES_MESHES = hasattr(TORCHS, "ShardPlacementResult")
AXES = ("a", "b", "c")
Dims = DataParallelMeshDims


# -- what is read ---------------------------------------------------------------------------------


@distributed(4)
def test_each_kind_of_mesh_reads_its_groups_ranks_and_sizes() -> None:
    mesh, rank = cpu_mesh((2, 2), ("out", "in")), dist.get_rank()
    one, two, none = FSDPMeshInfo(mesh["in"]), HSDPMeshInfo(mesh), DDPMeshInfo(mesh["out"])
    for info in (one, two):
        assert info.shard_process_group is mesh.get_group("in")
        assert (info.shard_world_size, info.shard_rank) == (2, rank % 2)
    assert one.process_groups == (mesh.get_group("in"),)
    assert two.process_groups == (mesh.get_group("in"), mesh.get_group("out"))
    assert none.process_groups == (mesh.get_group("out"),)
    assert (none.shard_world_size, none.shard_rank) == (1, 0)
    assert dist.get_process_group_ranks(none.shard_process_group) == [rank]
    assert DDPMeshInfo(mesh["in"]).shard_process_group is none.shard_process_group
    assert [info.data_parallel_size for info in (one, two, none)] == [2, 4, 2]
    assert one.placements(1) == (Shard(1),)
    assert two.placements(1) == (Replicate(), Shard(1))
    assert HSDPMeshInfo(mesh, 0, 1).placements(1) == (Shard(1), Replicate())
    assert none.placements(1) == (Replicate(),)


@pytest.mark.skipif(
    not (TORCH_NAMES_AXES and TORCH_PLACES_MESHES), reason="this torch has not all of the fields"
)
@distributed(2)
def test_the_fields_are_torchs_and_are_given_as_torchs_are() -> None:
    mesh = cpu_mesh((2, 1), ("dp", "tp"))
    for kind, arguments, where in (
        ("FSDPMeshInfo", {"shard_mesh_dim": 0}, mesh["dp"]),
        ("HSDPMeshInfo", {"shard_mesh_dim": 1, "replicate_mesh_dim": 0}, mesh),
        ("DDPMeshInfo", {"replicate_mesh_dim": 0}, mesh["dp"]),
    ):
        ours: Any = importlib.import_module("fullshard.sharding")
        mine, theirs = (getattr(module, kind)(where, **arguments) for module in (ours, TORCHS))
        for name in ("mesh", "shard_mesh_dim", "replicate_mesh_dim", "dp_mesh_dims", "spmd_mesh"):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert mine.replicate_mesh_dim == theirs.replicate_mesh_dim
    result = ShardPlacementResult(placement=Shard(1), mesh_info=FSDPMeshInfo(mesh["dp"]))
    names = list(TORCHS.ShardPlacementResult.__dataclass_fields__)
    assert list(result.__dataclass_fields__) == names


@pytest.mark.parametrize(
    ("available", "backends", "wanted"),
    [
        (False, "cpu:gloo,cuda:gloo", "cpu"),  # a CUDA build on a machine without a card
        (True, "cpu:gloo,cuda:nccl", "cuda"),
        (True, "cuda:nccl", "cuda"),
        (True, "cpu:gloo", "cpu"),
    ],
)
def test_ranks_compute_on_an_accelerator_that_is_there_and_that_their_group_serves(
    available: bool, backends: str, wanted: str
) -> None:
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return torch.device("cuda") if available or not check_available else None

    with (
        patch.object(torch.accelerator, "current_accelerator", current_accelerator),
        patch.object(dist, "get_backend_config", return_value=backends),
    ):
        assert device_type_of() == wanted


@distributed(4)
def test_named_axes_keep_the_mesh_that_they_are_of() -> None:
    mesh = cpu_mesh((2, 2, 1), AXES)
    for dims, axes, kind in (
        (Dims(shard="b"), ("b",), FSDPMeshInfo),
        (Dims(shard=("a", "b")), ("a", "b"), FSDPMeshInfo),
        (Dims(shard="c", replicate=("a", "b")), ("a", "b", "c"), HSDPMeshInfo),
        (Dims(replicate="a"), ("a",), DDPMeshInfo),
    ):
        info = mesh_info_of(mesh, dims)
        assert type(info) is kind
        assert info.spmd_mesh is mesh
        assert info.dp_mesh_dims == dims
        assert info.data_parallel_axes == axes
    plain = mesh_info_of(mesh["a"])
    assert (plain.spmd_mesh, plain.data_parallel_axes) == (None, ())


@pytest.mark.skipif(not TORCH_NAMES_AXES, reason="this torch has no dp_mesh_dims")
@distributed(4)
def test_named_axes_are_those_that_torch_reads() -> None:
    theirs: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_init")
    mesh = cpu_mesh((2, 2, 1), AXES)
    their_dims: Any = importlib.import_module("torch.distributed.fsdp").DataParallelMeshDims
    for given in (
        {"shard": "b"},
        {"shard": ("a", "b")},
        {"shard": "b", "replicate": "a"},
        {"shard": "a", "replicate": "b"},
        {"shard": ("b", "c"), "replicate": "a"},
        {"replicate": ("a", "c")},
    ):
        mine = mesh_info_of(mesh, Dims(**given))
        assert mesh_info_of(mesh, their_dims(**given)) == mine  # torch's own, by its fields
        wanted = theirs._get_mesh_info(mesh, their_dims(**given))
        assert type(mine).__name__ == type(wanted).__name__
        assert mine.mesh == wanted.mesh
        assert mine.mesh.get_coordinate() == wanted.mesh.get_coordinate()
        assert mine.process_groups[-1] is (
            getattr(wanted, "replicate_process_group", None) or wanted.shard_process_group
        )


# -- what is refused ------------------------------------------------------------------------------


@distributed(2)
def test_a_mesh_info_whose_axes_are_not_those_of_its_mesh_is_an_error() -> None:
    flat, deep = cpu_mesh(), cpu_mesh((2, 1), ("dp", "tp"))
    makers: list[Callable[[], FSDPMeshInfo]] = [
        lambda: FSDPMeshInfo(deep),
        lambda: FSDPMeshInfo(deep, 1),
        lambda: FSDPMeshInfo(flat, 1),
        lambda: FSDPMeshInfo(flat, None),
        lambda: FSDPMeshInfo(deep, 0, 1),
        lambda: HSDPMeshInfo(flat),
        lambda: HSDPMeshInfo(deep, 0, 0),
        lambda: DDPMeshInfo(deep),
        lambda: DDPMeshInfo(flat, 0),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=r"MeshInfo got a mesh of shape .*HSDPMeshInfo also"):
            make()
    with pytest.raises(TypeError, match="mesh of FSDPMeshInfo is a str"):
        FSDPMeshInfo("cpu")  # type: ignore[arg-type]  # the point


@distributed(2)
def test_a_mesh_whose_ranks_descend_is_an_error_as_collectives_order_them_by_number() -> None:
    with pytest.raises(ValueError, match=r"ranks descend along axis 0 of mesh \[1, 0\]"):
        fully_shard(nn.Linear(2, 2), mesh=DeviceMesh("cpu", [1, 0]))


def test_mesh_dims_are_names_each_once() -> None:
    with pytest.raises(ValueError, match="names an axis twice"):
        Dims(shard=("a", "b"), replicate="a")
    with pytest.raises(ValueError, match="names no axis"):
        Dims(shard=())
    with pytest.raises(TypeError, match=r"replicate of DataParallelMeshDims is 1; pass the name"):
        Dims(replicate=1)  # type: ignore[arg-type]  # the point
    with pytest.raises(TypeError, match=r"shard of DataParallelMeshDims is \('a', 2\)"):
        Dims(shard=("a", 2))  # type: ignore[arg-type]  # the point
    assert Dims(shard=["a"]) == Dims(shard=("a",))  # type: ignore[arg-type]  # from a file
    assert (Dims(shard="a").shard_names, Dims(shard="a").replicate_names) == (("a",), ())


@distributed(4)
def test_axes_named_in_another_order_or_that_cannot_be_flattened_are_errors() -> None:
    mesh = cpu_mesh((2, 2, 1), AXES)
    with pytest.raises(
        ValueError, match=r"dp_mesh_dims names \('b', 'a'\).*the order \('a', 'b'\)"
    ):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=Dims(shard=("b", "a")))
    taken = cpu_mesh((2, 1, 2), ("a", "b", "a_b"))
    linear = nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"\('a', 'b'\) of dp_mesh_dims cannot be flattened.*'a_b'"
    ):
        fully_shard(linear, mesh=taken, dp_mesh_dims=Dims(shard=("a", "b")))
    assert type(linear) is nn.Linear


class _ShardPlacementResult:
    """Another class than ours and torch's."""


def _returns(value: Any) -> Callable[[nn.Parameter], Any]:
    return lambda param: value


@distributed(2)
def test_what_shard_placement_fn_may_not_return_is_an_error_that_names_the_parameter() -> None:
    mesh = cpu_mesh()
    no_info: Any = mesh
    for value, error, words in (
        (0, TypeError, r"returned a int for weight; return Shard\(dim\), a ShardPlacementResult"),
        (ShardPlacementResult(None, no_info), TypeError, r"mesh_info torch.*DeviceMesh for weight"),
        (_ShardPlacementResult(), TypeError, "returned a _ShardPlacementResult for weight"),
        (ShardPlacementResult(Shard(2), FSDPMeshInfo(mesh)), ValueError, "has 2 dimensions"),
    ):
        linear = nn.Linear(2, 2)
        with pytest.raises(error, match=words):
            fully_shard(linear, mesh=mesh, shard_placement_fn=_returns(value))
        assert type(linear) is nn.Linear


@pytest.mark.skipif(
    not hasattr(TORCHS, "ShardPlacementResult"), reason="this torch has one mesh per module"
)
@distributed(2)
def test_placements_and_meshes_of_torch_are_taken_by_their_fields() -> None:
    mesh = cpu_mesh()
    theirs = TORCHS.ShardPlacementResult(Shard(1), TORCHS.FSDPMeshInfo(mesh, shard_mesh_dim=0))
    linear: Any = nn.Linear(2, 2)
    fully_shard(
        linear,
        mesh=mesh,
        shard_placement_fn=lambda param: theirs if param.ndim == 2 else None,
    )
    assert linear.weight.placements == (Shard(1),)
    assert linear.bias.placements == (Shard(0),)


@distributed(2)
def test_a_parameter_on_a_mesh_without_this_rank_is_an_error() -> None:
    first, _ = (DeviceMesh("cpu", [rank]) for rank in range(2))  # as many groups on each rank
    other = FSDPMeshInfo(first)
    linear = nn.Linear(2, 2)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"put weight on mesh .* in which this rank is not"):
            fully_shard(
                linear,
                mesh=cpu_mesh(),
                shard_placement_fn=_returns(ShardPlacementResult(None, other)),
            )
        assert type(linear) is nn.Linear


# -- post-forward meshes ---------------------------------------------------------------------------


@distributed(4)
def test_each_slice_of_a_mesh_has_post_forward_meshes_of_its_own() -> None:
    """Ranks 0 and 2 shard together, and so do 1 and 3: no process group holds both pairs."""
    mesh = cpu_mesh((2, 2, 1), AXES)
    rank = dist.get_rank()
    for part, expected in ((mesh["a"], {0: 1, 1: 1}), (cpu_mesh(), {0: 2, 1: 2})):
        size = expected[rank % 2]
        linear: Any = fully_shard(nn.Linear(4, 4), mesh=part, reshard_after_forward=size)
        out = linear(torch.ones(1, 4))
        out.sum().backward()
        group = group_of(linear)
        assert group.gathering.setup.post_forward_size == (0 if size == 1 else size)


@distributed(4)
def test_the_next_gather_uses_compute_shards_up_unless_a_user_asks_for_the_parameters() -> None:
    sizes: list[int] = []
    linear: Any = fully_shard(nn.Linear(4, 4), mesh=cpu_mesh(), reshard_after_forward=2)
    linear.set_custom_all_gather(ToldAllGather(lambda _, group: sizes.append(group.size())))
    inputs = group_of(linear).gathering.setup.prepare().inputs
    loss = linear(torch.ones(1, 4)).sum()
    linear.reshard()  # there is no full parameter to free
    with torch.no_grad():
        linear(torch.ones(1, 4))
    assert inputs.has_copies  # the backward is outstanding
    loss.backward()
    assert sizes == [4, 2, 2] and not inputs.has_copies
    sizes.clear()
    loss = linear(torch.ones(1, 4)).sum()
    with torch.no_grad():
        linear.weight.to_local().fill_(3.0)
    linear.unshard()
    assert (linear.weight == 3.0).all()
    linear.reshard()
    loss.backward()
    linear.set_reshard_after_forward(True)
    linear(torch.ones(1, 4)).sum().backward()
    assert sizes == [4, 4, 4, 4, 4]


@distributed(4)
def test_a_smaller_world_that_does_not_divide_one_of_the_meshes_is_an_error() -> None:
    mesh = cpu_mesh((2, 2), ("out", "in"))
    over = ShardPlacementResult(None, FSDPMeshInfo(mesh["in"]))
    linear = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="must divide the 2 ranks"):
        fully_shard(
            linear,
            mesh=cpu_mesh(),
            reshard_after_forward=4,
            shard_placement_fn=lambda p: over if p.ndim == 2 else None,
        )
    assert type(linear) is nn.Linear
    replicated = fully_shard(
        linear, mesh=mesh, dp_mesh_dims=Dims(replicate=("out", "in")), reshard_after_forward=3
    )  # as in torch, where nothing is sharded there is nothing to say
    assert group_of(replicated).gathering.setup.post_forward_size == 0
    assert replicate(nn.Linear(2, 2)) is not None
