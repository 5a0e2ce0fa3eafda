"""The checks of ``fully_shard``: what came, what to pass; a call that raises changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.policies import CPUOffloadPolicy, KeepUnsharded, MixedPrecisionPolicy, NoPrefetch
from fullshard.sharding import DataParallelMeshDims, FSDPModule, NoOffload, fully_shard
from support.ranks import cpu_mesh, distributed
from support.surface.errors import says
from support.surface.model import batch, build

# -- the module -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "came"),
    [
        ("net", "str"),
        (None, "NoneType"),
        (3, "int"),
        (nn.Parameter(torch.zeros(2)), "Parameter"),
        ([nn.Linear(2, 2), "net"], "str"),
        ({"net": nn.Linear(2, 2)}, "dict"),
        (nn.Linear, "type"),
    ],
    ids=["str", "None", "int", "parameter", "list", "dict", "class"],
)
@distributed(2)
def test_what_is_no_module_is_a_type_error_that_says_what_came(module: Any, came: str) -> None:
    with pytest.raises(TypeError, match=says("module", came, "nn.Module")):
        fully_shard(module)


@distributed(2)
def test_an_empty_list_of_modules_is_an_error() -> None:
    with pytest.raises(ValueError, match=says("module", "empty list", "at least one")):
        fully_shard([])


@pytest.mark.parametrize(
    "container",
    [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})],
    ids=["ModuleList", "ModuleDict"],
)
@distributed(2)
def test_a_container_without_a_forward_is_an_error_that_says_what_to_shard(
    container: nn.Module,
) -> None:
    with pytest.raises(ValueError, match=says(type(container).__name__, "forward", "each module")):
        fully_shard(container)


@distributed(2)
def test_a_module_list_with_a_forward_of_its_own_can_be_sharded() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x)
            return x

    chain = fully_shard(Chain([nn.Linear(3, 3), nn.Linear(3, 3)]))
    assert chain(torch.ones(1, 3)).shape == (1, 3)


@distributed(2)
def test_a_module_twice_in_a_list_is_an_error() -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=says("same module twice", "once")):
        fully_shard([linear, nn.Linear(2, 2), linear])
    assert type(linear) is nn.Linear


@distributed(2)
def test_a_module_given_in_two_calls_is_an_error() -> None:
    linear = fully_shard(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=says("Linear", "before")):
        fully_shard(linear)
    with pytest.raises(ValueError, match=says("Linear", "before")):
        fully_shard([nn.Linear(2, 2), linear])
    assert linear(torch.ones(1, 2)).shape == (1, 2)


# -- the mesh -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "came"), [("cpu", "str"), (2, "int"), ((2,), "tuple")], ids=["str", "int", "tuple"]
)
@distributed(2)
def test_an_unknown_mesh_is_a_type_error_that_shows_how_to_make_one(mesh: Any, came: str) -> None:
    with pytest.raises(TypeError, match=says("mesh", came, "init_device_mesh", "None")):
        fully_shard(nn.Linear(2, 2), mesh=mesh)


@distributed(2)
def test_a_process_group_is_no_mesh() -> None:
    with pytest.raises(TypeError, match=says("mesh", "ProcessGroup", "DeviceMesh")):
        fully_shard(nn.Linear(2, 2), mesh=dist.group.WORLD)  # type: ignore[arg-type]  # the point


@distributed(2)
def test_a_3d_mesh_is_an_error_that_says_to_pass_one_or_two_axes() -> None:
    mesh = cpu_mesh((2, 1, 1), ("dp", "cp", "tp"))
    with pytest.raises(ValueError, match=says("mesh", "3 dimensions", "(2, 1, 1)", "axes of it")):
        fully_shard(nn.Linear(2, 2), mesh=mesh)


@distributed(2)
def test_one_axis_of_a_larger_mesh_is_taken_by_slice_or_by_name() -> None:
    mesh = cpu_mesh((2, 1, 1), ("dp", "cp", "tp"))
    sliced = fully_shard(nn.Linear(2, 2), mesh=mesh["dp"])
    named = fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    for linear in (sliced, named):
        weight: Any = linear.weight
        assert weight.device_mesh == mesh["dp"]
        assert weight.to_local().shape == (1, 2)


@distributed(2)
def test_a_mesh_without_this_rank_is_an_error_that_names_the_rank() -> None:
    mesh, _ = (DeviceMesh("cpu", [rank]) for rank in range(2))  # as many groups on each rank
    linear = nn.Linear(2, 2)
    if dist.get_rank() == 0:
        assert isinstance(fully_shard(linear, mesh=mesh), FSDPModule)
    else:
        with pytest.raises(ValueError, match=says("rank 1", "not in mesh")):
            fully_shard(linear, mesh=mesh)
        assert type(linear) is nn.Linear


@pytest.mark.parametrize(
    ("dims", "error", "words"),
    [
        ("dp", TypeError, ("str", "DataParallelMeshDims of fullshard")),
        (DataParallelMeshDims(shard="pp"), ValueError, ("'pp'", "'dp', 'cp', 'tp'")),
        (
            DataParallelMeshDims(shard="dp", replicate="pp"),
            ValueError,
            ("'pp'", "'dp', 'cp', 'tp'"),
        ),
    ],
    ids=["str", "unknown shard", "unknown replicate"],
)
@distributed(2)
def test_a_wrong_dp_mesh_dims_is_an_error(
    dims: Any, error: type[Exception], words: tuple[str, ...]
) -> None:
    mesh = cpu_mesh((2, 1, 1), ("dp", "cp", "tp"))
    with pytest.raises(error, match=says("dp_mesh_dims", *words)):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=dims)


@distributed(2)
def test_named_axes_of_the_default_mesh_are_an_error_as_it_has_no_names() -> None:
    with pytest.raises(ValueError, match=says("dp_mesh_dims", "'dp'")):
        fully_shard(nn.Linear(2, 2), dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def test_mesh_dims_that_name_no_axis_are_an_error() -> None:
    with pytest.raises(ValueError, match=says("names no axis", "shard", "replicate")):
        DataParallelMeshDims()


def test_without_a_process_group_the_error_says_to_make_one() -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=says("process group", "init_process_group", "mesh=")):
        fully_shard(linear)
    assert type(linear) is nn.Linear


# -- everything else ------------------------------------------------------------------------------


def _not_a_shard(param: nn.Parameter) -> Any:
    return 0


def _no_such_dim(param: nn.Parameter) -> Shard:
    return Shard(2)


WRONG = {
    "reshard_after_forward=str": ("reshard_after_forward", "yes", TypeError, ("str",)),
    "reshard_after_forward=float": ("reshard_after_forward", 0.5, TypeError, ("float",)),
    "reshard_after_forward=class": (
        "reshard_after_forward",
        KeepUnsharded,
        TypeError,
        ("instance",),
    ),
    "reshard_after_forward=3": (
        "reshard_after_forward",
        3,
        ValueError,
        ("3", "divide the 2 ranks", "True, False"),
    ),
    "reshard_after_forward=0": (
        "reshard_after_forward",
        0,
        ValueError,
        ("0", "divide the 2 ranks"),
    ),
    "reshard_after_forward=-1": ("reshard_after_forward", -1, ValueError, ("-1", "divide the 2")),
    "shard_placement_fn=Shard": ("shard_placement_fn", Shard(0), TypeError, ("Shard", "function")),
    "shard_placement_fn=int": ("shard_placement_fn", 0, TypeError, ("int", "function")),
    "shard_placement_fn->int": (
        "shard_placement_fn",
        _not_a_shard,
        TypeError,
        ("int", "weight", "Shard(dim)"),
    ),
    "shard_placement_fn->dim": ("shard_placement_fn", _no_such_dim, ValueError, ("weight", "2")),
    "mp_policy=None": ("mp_policy", None, TypeError, ("NoneType", "fullshard.policies")),
    "mp_policy=dtype": ("mp_policy", torch.bfloat16, TypeError, ("dtype", "fullshard.policies")),
    "mp_policy=class": (
        "mp_policy",
        MixedPrecisionPolicy,
        TypeError,
        ("class MixedPrecisionPolicy", "instance"),
    ),
    "mp_policy=other": ("mp_policy", NoOffload(), TypeError, ("NoOffload", "gathered_dtype")),
    "offload_policy=None": ("offload_policy", None, TypeError, ("NoneType", "stage_in")),
    "offload_policy=bool": ("offload_policy", True, TypeError, ("bool", "stage_in")),
    "offload_policy=class": ("offload_policy", CPUOffloadPolicy, TypeError, ("instance",)),
    "ignored_params=list": ("ignored_params", [], TypeError, ("list", "set")),
    "ignored_params=names": ("ignored_params", {"weight"}, TypeError, ("str", "nn.Parameter")),
    "ignored_params=module": ("ignored_params", nn.Linear(2, 2), TypeError, ("Linear", "set")),
    "prefetch_policy=int": ("prefetch_policy", 2, TypeError, ("int", "in_forward", "in_backward")),
    "prefetch_policy=None": ("prefetch_policy", None, TypeError, ("NoneType", "in_forward")),
    "prefetch_policy=class": (
        "prefetch_policy",
        NoPrefetch,
        TypeError,
        ("class NoPrefetch", "instance"),
    ),
    "wire_policy=dtype": ("wire_policy", torch.bfloat16, TypeError, ("dtype", "gathered_as")),
    "wire_policy=None": ("wire_policy", None, TypeError, ("NoneType", "reduction")),
}


@pytest.mark.parametrize("case", WRONG)
@distributed(2)
def test_a_wrong_argument_is_an_error_that_names_it_and_what_came(case: str) -> None:
    argument, value, error, words = WRONG[case]
    linear = nn.Linear(2, 2)
    arguments: dict[str, Any] = {argument: value}
    with pytest.raises(error, match=says(argument, *words)):
        fully_shard(linear, **arguments)
    assert type(linear) is nn.Linear
    fully_shard(linear)


@distributed(2)
def test_torchs_own_policies_are_taken_by_their_fields() -> None:
    """Libraries build them before anybody can hand in ours; right is torch's own with the same."""
    fields: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    inner = torch_fsdp.MixedPrecisionPolicy(**fields)
    outer = torch_fsdp.MixedPrecisionPolicy(**fields, output_dtype=torch.float64)
    offload = torch_fsdp.CPUOffloadPolicy(pin_memory=False)
    engines: tuple[Any, ...] = (torch_fsdp.fully_shard, fully_shard)
    got = []
    for shard in engines:
        net: Any = build()
        for block in net.blocks:
            shard(block, mp_policy=inner, offload_policy=offload)
        shard(net, mp_policy=outer, offload_policy=torch_fsdp.OffloadPolicy())
        output = net(torch.ones(2, 6))
        output.sum().backward()
        got.append([output, *(param.grad.full_tensor() for param in net.parameters())])
    assert got[1][0].dtype == torch.float64
    for our, right in zip(got[1], got[0], strict=True):
        assert torch.equal(our, right)


@distributed(2)
def test_a_policy_of_torch_in_the_wrong_place_is_an_error_that_names_it() -> None:
    misplaced: Any = torch_fsdp.CPUOffloadPolicy()
    with pytest.raises(TypeError, match=says("mp_policy", "CPUOffloadPolicy", "gathered_dtype")):
        fully_shard(nn.Linear(2, 2), mp_policy=misplaced)


# -- parameters that cannot be sharded ------------------------------------------------------------


@distributed(2)
def test_a_parameter_that_is_not_strided_is_an_error_that_names_it() -> None:
    net = build()
    net.blocks[0].register_parameter("table", nn.Parameter(torch.eye(3).to_sparse()))
    with pytest.raises(ValueError, match=says("blocks.0.table", "sparse", "strided")):
        fully_shard(net)


@distributed(2)
def test_a_parameter_on_the_very_mesh_of_the_call_is_an_error_that_names_it() -> None:
    net = build()
    whole = distribute_tensor(net.head.weight.detach(), cpu_mesh(), [Shard(0)])
    net.head.weight = nn.Parameter(whole)
    with pytest.raises(ValueError, match=says("head.weight", "DTensor")):
        fully_shard(net)


@distributed(2)
def test_a_model_that_torch_sharded_is_an_error_that_names_a_parameter() -> None:
    net: Any = torch_fsdp.fully_shard(build())
    with pytest.raises(ValueError, match=says("stem.weight", "DTensor")):
        fully_shard(net)


# -- a call that raises changes nothing -----------------------------------------------------------


def _picture(module: nn.Module) -> list[object]:
    """All that a call could have changed: classes, attributes, parameters, buffers, hooks."""
    seen: list[object] = []
    for name, each in module.named_modules():
        seen += [name, type(each), sorted(each.__dict__)]
        seen += [(key, id(value)) for key, value in each._parameters.items()]
        seen += [(key, id(value)) for key, value in each._buffers.items()]
        hooks = (value for key, value in sorted(each.__dict__.items()) if "hooks" in key)
        seen += [len(value) for value in hooks if isinstance(value, OrderedDict | dict)]
    seen += [sorted(param.__dict__) for param in module.parameters()]
    return seen


class _BreaksAtItsThirdShard(NoOffload):
    """Raises in the middle of the cutting, as an allocation that fails would."""

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        count = self.__dict__.setdefault("count", [])
        count.append(shard)
        if len(count) == 3:
            raise MemoryError("no room for the third shard")
        return shard


def _raise_for_the_head(param: nn.Parameter) -> Shard | None:
    if param.shape[0] == 3:
        raise LookupError("no placement for the head")
    return None


def _with_a_sparse_one(net: Any) -> dict[str, Any]:
    net.head.register_parameter("table", nn.Parameter(torch.eye(3).to_sparse()))
    return {}


def _given(**arguments: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda net: arguments


FAILING: dict[str, tuple[Callable[[Any], dict[str, Any]], type[Exception]]] = {
    "sparse": (_with_a_sparse_one, ValueError),
    "mesh": (_given(mesh="cpu"), TypeError),
    "policy": (_given(mp_policy=None), TypeError),
    "placement": (_given(shard_placement_fn=_raise_for_the_head), LookupError),
    "offload": (_given(offload_policy=_BreaksAtItsThirdShard()), MemoryError),
}


@pytest.mark.parametrize("case", FAILING)
@distributed(2)
def test_a_call_that_raises_leaves_the_module_as_it_was(case: str) -> None:
    make, error = FAILING[case]
    net = build()
    fully_shard(net.blocks[0])
    arguments = make(net)
    before = _picture(net)
    with pytest.raises(error):
        fully_shard(net, **arguments)
    assert _picture(net) == before
    if case == "sparse":
        del net.head.table
    assert fully_shard(net)(batch()).shape == (4, 3)
