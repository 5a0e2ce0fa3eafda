"""``fully_shard`` over tensor parallel blocks equals the unsharded model, and torch's own.

Meshes are (dp, tp) and (dp_replicate, dp_shard, tp). In double precision, so that what is wrong is
not taken for rounding; hidden sizes that no number of ranks divides are among them.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from fullshard.sharding.hooks.lookup import the_state
from support.checkpoints import assert_full_states_travel, load, save, whole_values
from support.parity.compare import assert_equal, gradients_of, parameters_of, rounding
from support.products import few
from support.ranks import cpu_mesh, distributed, run_on_ranks
from support.surface.ranks import assert_equal_state
from support.tp_model import Net, batch, build, parallelize, rows_of, shard, train

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

SHAPES = [(2, 2), (1, 4), (4, 1)]
# What is a sum over the tensor parallel axis (the gradient of a norm under sequence parallelism) is
# added up in the reduce dtype; by torch before 2.15 in the dtype of the computation.
SINCE_TORCH_ADDS_UP_IN_THE_REDUCE_DTYPE = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="this torch adds up over the tensor parallel axis in bf16"
)
# One of them in each run, all in the matrix.
UNEVEN_FIRST = few([5, 7, 8], 5)


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("dp", "tp") if len(shape) == 2 else ("dp_replicate", "dp_shard", "tp")
    return cpu_mesh(shape, names)


def _data_axes(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp"] if mesh.ndim == 2 else mesh["dp_replicate", "dp_shard"]


def _data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's place among the data parallel ones, and their number."""
    return dist.get_rank() // mesh.size(-1), dist.get_world_size() // mesh.size(-1)


def _sharded(mesh: DeviceMesh, engine: Any = fully_shard, hidden: int = 8, **options: Any) -> Any:
    dtype = options.pop("dtype", torch.float64)
    model = parallelize(build(hidden, dtype=dtype), mesh["tp"])
    return shard(model, engine, mesh=_data_axes(mesh), **options)


def _rows(mesh: DeviceMesh, steps: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [rows_of(batch(step, dtype=dtype), *_data_rank(mesh)) for step in range(steps)]


def _whole(steps: int) -> list[torch.Tensor]:
    return [batch(step) for step in range(steps)]


@pytest.mark.parametrize("hidden", UNEVEN_FIRST)
@pytest.mark.parametrize(
    "shape", few([*SHAPES, (2, 1, 2), (1, 2, 2), (2, 2, 1)], (2, 2), (1, 4), (2, 1, 2))
)
@distributed(4)
def test_training_equals_the_unsharded_model(shape: tuple[int, ...], hidden: int) -> None:
    mesh = _mesh(shape)
    model, plain = _sharded(mesh, hidden=hidden), build(hidden)
    model(_rows(mesh, 1)[0]).square().mean().backward()
    plain(batch(0)).square().mean().backward()
    assert_equal(gradients_of(model), gradients_of(plain), rounding(4), "gradients")
    for param in model.parameters():
        assert isinstance(param, DTensor) and isinstance(param.grad, DTensor)
        assert param.grad.placements == param.placements
        assert param.grad.device_mesh == param.device_mesh
    train(model, _rows(mesh, 3))  # the first step has these gradients twice
    train(plain, _whole(3))
    assert_equal(parameters_of(model), parameters_of(plain), rounding(4, steps=4), "parameters")


@pytest.mark.cross
@pytest.mark.parametrize("hidden", [7, 8])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2), (1, 2, 2)])
@distributed(4)
def test_meshes_placements_and_shards_equal_torchs(shape: tuple[int, ...], hidden: int) -> None:
    mesh = _mesh(shape)
    ours = _sharded(mesh, hidden=hidden).state_dict()
    theirs = _sharded(mesh, torch_fsdp.fully_shard, hidden=hidden).state_dict()
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        got = ours[name]
        assert got.placements == expected.placements, name
        assert got.device_mesh == expected.device_mesh, name
        assert got.shape == expected.shape and got.stride() == expected.stride(), name
        assert torch.equal(got.to_local(), expected.to_local()), name


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"),
    [
        (None, None),
        pytest.param(torch.bfloat16, torch.float32, marks=SINCE_TORCH_ADDS_UP_IN_THE_REDUCE_DTYPE),
        pytest.param(torch.bfloat16, torch.bfloat16, marks=pytest.mark.matrix),
    ],
)
@distributed(4)
def test_training_equals_torchs_own_bit_for_bit(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, reshard: bool
) -> None:
    mesh = _mesh((2, 2))
    results = []
    for engine, policy in (
        (fully_shard, MixedPrecisionPolicy),
        (torch_fsdp.fully_shard, torch_fsdp.MixedPrecisionPolicy),
    ):
        model = _sharded(
            mesh,
            engine,
            dtype=torch.float32,
            mp_policy=policy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
            reshard_after_forward=reshard,
        )
        train(model, _rows(mesh, 3, torch.float32))
        results.append(model.state_dict())
    for name, expected in results[1].items():
        assert torch.equal(results[0][name].to_local(), expected.to_local()), name


@pytest.mark.parametrize("accumulated", [False, True])
@distributed(4)
def test_sums_over_the_tensor_parallel_axis_are_in_the_reduce_dtype(accumulated: bool) -> None:
    mesh = _mesh((2, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(mesh, dtype=torch.float32, mp_policy=policy)
    norm = model.blocks[0].norm
    found: list[torch.Tensor] = []  # of each backward, what this rank has of the sum

    def listen(module: Any, args: Any) -> None:
        module.weight.register_hook(lambda grad: found.append(grad.to_local().clone()))
        listening.remove()  # the parameter that modules see stays the same

    listening = norm.register_forward_pre_hook(listen)
    for step, rows in enumerate(_rows(mesh, 1 + accumulated, torch.float32)):
        model.set_requires_gradient_sync(step == int(accumulated))
        model(rows).square().mean().backward()
    total = torch.zeros(found[0].shape)
    for of_one_backward in found:
        assert of_one_backward.dtype is torch.bfloat16
        part = of_one_backward.float()
        dist.all_reduce(part, group=mesh.get_group("tp"))
        total += part
    dist.all_reduce(total, group=mesh.get_group("dp"))
    assert torch.equal(norm.weight.grad.full_tensor(), total / mesh.size(0))


@distributed(4)
def test_a_smaller_world_for_the_backward_gather_changes_nothing() -> None:
    mesh = _mesh((4, 1))
    model, plain = _sharded(mesh, reshard_after_forward=2), build()
    (group,) = the_state(model.blocks[0]).own_groups
    model(_rows(mesh, 1)[0])
    assert group.gathering.setup.prepare().inputs.has_copies
    train(model, _rows(mesh, 2))
    train(plain, _whole(2))
    assert_equal(parameters_of(model), parameters_of(plain), rounding(4, steps=2), "parameters")


@distributed(4)
def test_inside_forward_a_parameter_is_the_dtensor_that_it_was() -> None:
    mesh = _mesh((2, 2))
    model = _sharded(mesh)
    plain = parallelize(build(), mesh["tp"])
    seen: dict[str, Any] = {}
    model.blocks[0].up.register_forward_pre_hook(
        lambda module, args: seen.update(module.named_parameters())
    )
    model(_rows(mesh, 1)[0])
    for name, expected in plain.blocks[0].up.named_parameters():
        got = seen[name]
        assert isinstance(got, DTensor) and isinstance(got, nn.Parameter)
        assert got.placements == expected.placements
        assert got.device_mesh == mesh["tp"]
        assert got.shape == expected.shape


@pytest.mark.parametrize("order", few([("dp", "tp"), ("tp", "dp")], ("tp", "dp")))
@distributed(4)
def test_the_axes_of_the_mesh_may_come_in_either_order(order: tuple[str, str]) -> None:
    mesh = cpu_mesh((2, 2), order)
    model, plain = parallelize(build(), mesh["tp"]), build()
    shard(model, fully_shard, mesh=mesh["dp"])
    rank = mesh.get_local_rank("dp")
    train(model, [rows_of(batch(step), rank, 2) for step in range(2)])
    train(plain, _whole(2))
    assert_equal(parameters_of(model), parameters_of(plain), rounding(4, steps=2), "parameters")


# -- state dicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", UNEVEN_FIRST)
@pytest.mark.parametrize("shape", few([*SHAPES, (1, 2, 2)], (2, 2), (1, 2, 2)))
@distributed(4)
def test_full_state_dicts_are_made_and_loaded_also_by_torch(
    shape: tuple[int, ...], hidden: int
) -> None:
    model, expected = _sharded(_mesh(shape), hidden=hidden), build(hidden).state_dict()
    assert_full_states_travel(model, expected)
    theirs = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_equal_state(theirs, expected)
    assert_equal_state(model.state_dict(), expected)


def _trained(shape: tuple[int, int], hidden: int) -> tuple[Net, torch.optim.Optimizer]:
    """A model, and its optimizer after one step on zero gradients, whose moments are then set."""
    mesh = _mesh(shape)
    model = _sharded(mesh, hidden=hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(_rows(mesh, 1)[0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _save(folder: Path, shape: tuple[int, int], hidden: int) -> dict[str, torch.Tensor]:
    model, optimizer = _trained(shape, hidden)
    save(folder, model, optimizer)
    return whole_values(model, optimizer)


def _load(folder: Path, shape: tuple[int, int], hidden: int) -> dict[str, torch.Tensor]:
    model, optimizer = _trained(shape, hidden)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load(folder, model, optimizer)
    return whole_values(model, optimizer)


@pytest.mark.parametrize("hidden", UNEVEN_FIRST)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    few(
        [((2, 2), (1, 2)), ((2, 2), (4, 1)), ((2, 2), (2, 2)), ((4, 1), (2, 2)), ((1, 4), (2, 2))],
        ((2, 2), (1, 2)),
        together=True,
    ),
)
def test_a_checkpoint_loads_on_another_mesh(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int], hidden: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = run_on_ranks(_save, 4, tmp_path, saved, hidden)[0]
        after = run_on_ranks(_load, loaded[0] * loaded[1], tmp_path, loaded, hidden)[0]
    assert_equal_state(after, before)


# -- what is refused ------------------------------------------------------------------------------


@distributed(4)
def test_overlapping_meshes_are_refused_by_name_and_leave_the_module_alone() -> None:
    mesh = _mesh((2, 2))
    for data in (mesh, mesh["tp"]):
        model = parallelize(build(), mesh["tp"])
        weight = model.blocks[0].up.weight
        with pytest.raises(ValueError, match=r"weight is a DTensor on .*different named axes"):
            fully_shard(model.blocks[0].up, mesh=data)
        with pytest.raises(ValueError, match=r"norm\.weight is a DTensor on"):
            fully_shard(model.blocks[0], mesh=data)
        assert model.blocks[0].up.weight is weight


@distributed(4)
def test_a_mesh_without_names_is_refused_by_name() -> None:
    mesh = _mesh((2, 2))
    model = parallelize(build(), mesh["tp"])
    with pytest.raises(ValueError, match=r"norm\.weight is a DTensor on .*named axes"):
        fully_shard(model.blocks[0])


@distributed(4)
def test_a_parameter_that_is_not_added_up_is_refused_by_name() -> None:
    mesh = _mesh((2, 2))
    module = nn.Module()
    module.weight = nn.Parameter(DTensor.from_local(torch.ones(4), mesh["tp"], [Partial()]))
    with pytest.raises(ValueError, match=r"weight is a DTensor with placements .*redistribute"):
        fully_shard(module, mesh=mesh["dp"])


@distributed(4)
def test_a_dim_that_the_local_part_lacks_is_refused_and_any_other_is_cut() -> None:
    mesh = _mesh((2, 2))
    model = parallelize(build(), mesh["tp"])
    linear = model.blocks[0].down
    whole = linear.weight.full_tensor()
    fully_shard(linear, mesh=mesh["dp"], shard_placement_fn=lambda param: Shard(param.ndim - 1))
    weight: Any = linear.weight
    assert weight.to_local().shape == (6, 2)
    assert torch.equal(weight.full_tensor(), whole)
    bias: Any = linear.bias
    assert bias.placements == (Shard(0), Replicate())
