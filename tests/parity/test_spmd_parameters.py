"""Parameters that are ``DTensor`` on one mesh of all axes, of which ``dp_mesh_dims`` names some.

As in torch's own ``fully_shard``: they are replicated over the data parallel axes, inside forward
they are what they were, and outside they are sharded over those axes too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fullshard.sharding import DataParallelMeshDims, fully_shard
from support.checkpoints import assert_full_states_travel
from support.modules import in_turn
from support.parity.compare import assert_equal, gradients_of, parameters_of, rounding
from support.products import few
from support.ranks import cpu_mesh, distributed

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

WIDTH = 6
PLANNING = 300.0  # seconds: DTensor searches long for how to redistribute on four axes
FLAT = {"shard": ("dp_shard", "cp")}
CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "shard": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "tp first": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "hybrid": ((2, 1, 2), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
    "hybrid, one replica": ((1, 2, 2), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
    "flattened": ((2, 1, 2), ("dp_shard", "cp", "tp"), FLAT),
    "flattened, no tp": ((2, 2, 1), ("dp_shard", "cp", "tp"), FLAT),
    "flattened, hybrid": (
        (1, 2, 1, 2),
        ("rep", "dp_shard", "cp", "tp"),
        {**FLAT, "replicate": "rep"},
    ),
}


def _build(hidden: int) -> Any:
    """One layer by columns, one by rows, and a norm that no axis cuts."""
    torch.manual_seed(0)
    return in_turn(
        norm=nn.LayerNorm(WIDTH),
        up=nn.Linear(WIDTH, hidden),
        bend=nn.Tanh(),
        down=nn.Linear(hidden, WIDTH, bias=False),
    ).double()


def _on(mesh: DeviceMesh, hidden: int) -> Any:
    """The model with every parameter on ``mesh``; cut along its ``tp`` axis only."""
    model = _build(hidden)
    cuts = {"up": Shard(0), "down": Shard(1), "norm": Replicate()}
    tp = (mesh.mesh_dim_names or ()).index("tp")
    for name, cut in cuts.items():
        layer = model.get_submodule(name)
        for key, param in list(layer.named_parameters()):
            placements: list[Any] = [Replicate()] * mesh.ndim
            placements[tp] = cut
            setattr(layer, key, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    return model


def _data_rank(mesh: DeviceMesh) -> int:
    """This rank's number among those that see other data."""
    names = mesh.mesh_dim_names or ()
    rank = 0
    for axis, size in zip(names, mesh.shape, strict=True):
        if axis != "tp":
            rank = rank * size + mesh.get_local_rank(axis)
    return rank


def _batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)


def _loss(model: Any, mesh: DeviceMesh | None, step: int) -> torch.Tensor:
    """The mean over a data parallel rank's rows; of the whole batch without a mesh."""
    if mesh is None:
        return model(_batch(step)).square().mean()
    names = mesh.mesh_dim_names or ()
    ranks = mesh.size() // mesh.size(names.index("tp"))
    rows = _batch(step).chunk(ranks)[_data_rank(mesh)]
    placements = [Replicate() if name == "tp" else Shard(0) for name in names]
    inputs = DTensor.from_local(rows, mesh, placements, run_check=False)
    return model(inputs).redistribute(mesh, placements).to_local().square().mean()


def _train(model: Any, mesh: DeviceMesh | None, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1)
    for step in range(steps):
        _loss(model, mesh, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def _sharded(case: str, hidden: int, torchs: bool = False) -> tuple[Any, DeviceMesh]:
    shape, names, dims = CASES[case]
    mesh = cpu_mesh(shape, names)
    model = _on(mesh, hidden)
    if torchs:
        their_dims = torch_fsdp.DataParallelMeshDims(**dims)
        torch_fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=their_dims)
    else:
        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))
    return model, mesh


# What runs in `tests`; the others in the matrix.
FEW = pytest.mark.parametrize("case", few(CASES, "tp first", "hybrid"))
EVEN_OR_NOT = pytest.mark.parametrize("hidden", few([5, 8], 5))


@EVEN_OR_NOT
@FEW
@distributed(4, timeout=PLANNING)
def test_training_equals_the_unsharded_model(case: str, hidden: int) -> None:
    model, mesh = _sharded(case, hidden)
    plain = _build(hidden)
    _loss(model, mesh, 0).backward()
    _loss(plain, None, 0).backward()
    assert_equal(gradients_of(model), gradients_of(plain), rounding(4), "gradients")
    for param in model.parameters():
        assert param.grad.placements == param.placements
    _train(model, mesh)
    _train(plain, None)
    assert_equal(parameters_of(model), parameters_of(plain), rounding(4, steps=4), "parameters")


@pytest.mark.skipif(
    not hasattr(torch_fsdp, "DataParallelMeshDims"), reason="this torch has no dp_mesh_dims"
)
@EVEN_OR_NOT
@pytest.mark.parametrize("case", few(CASES, "tp first"))
@distributed(4, timeout=PLANNING)
def test_meshes_placements_and_training_equal_torchs(case: str, hidden: int) -> None:
    (ours, mesh), (theirs, _) = _sharded(case, hidden), _sharded(case, hidden, torchs=True)
    for (name, got), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert got.placements == expected.placements, name
        assert got.device_mesh == expected.device_mesh, name
        assert torch.equal(got.to_local(), expected.to_local()), name
    _train(ours, mesh)
    _train(theirs, mesh)
    assert_equal(
        {name: param.to_local() for name, param in ours.named_parameters()},
        {name: param.to_local() for name, param in theirs.named_parameters()},
        rounding(4, steps=3),
        "parameters",
    )


@FEW
@distributed(4)
def test_inside_forward_a_parameter_is_the_dtensor_that_it_was(case: str) -> None:
    model, mesh = _sharded(case, 8)
    seen: dict[str, Any] = {}
    model.up.register_forward_pre_hook(lambda module, args: seen.update(weight=module.weight))
    _loss(model, mesh, 0)
    expected = _on(mesh, 8).up.weight
    assert seen["weight"].device_mesh == mesh and seen["weight"].placements == expected.placements
    assert seen["weight"].shape == expected.shape


@distributed(4)
def test_replicas_only_leave_the_parameter_as_it_is() -> None:
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    model, plain = _on(mesh, 8), _build(8)
    before = model.up.weight.placements
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))
    assert model.up.weight.placements == before
    _train(model, mesh)
    _train(plain, None)
    assert_equal(parameters_of(model), parameters_of(plain), rounding(4, steps=3), "parameters")


@FEW
@distributed(4)
def test_full_state_dicts_are_made_and_loaded(case: str) -> None:
    model, _ = _sharded(case, 5)
    assert_full_states_travel(model, _build(5).state_dict())


@distributed(4)
def test_a_parameter_cut_along_a_data_parallel_axis_is_refused_by_name() -> None:
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    model = nn.Linear(4, 4)
    weight = distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()])
    model.weight = nn.Parameter(weight)
    for dims in (DataParallelMeshDims(shard="dp"), DataParallelMeshDims(replicate="dp")):
        with pytest.raises(ValueError, match=r"weight is a DTensor with .* on axis 'dp'.*Repl"):
            fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert isinstance(model.weight, DTensor) and model.weight.placements[0] == Shard(0)
