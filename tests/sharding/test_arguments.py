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
from fullshard.sharding import (
    DataParallelMeshDims,
    FSDPModule,
    NoOffload,
    fully_shard,
    replicate,
)
from support.ranks import cpu_mesh, distributed
from support.surface.errors import says
from support.surface.model import batch, build


def _not_a_shard(param: nn.Parameter) -> Any:
    return 0


def _no_such_dim(param: nn.Parameter) -> Shard:
    return Shard(2)


def _deep_mesh() -> DeviceMesh:
    return cpu_mesh((2, 1, 1), ("dp", "cp", "tp"))


def _twice(module: nn.Module) -> list[nn.Module]:
    return [module, nn.Linear(2, 2), module]


Dims = DataParallelMeshDims
AXES = ("'pp'", "'dp', 'cp', 'tp'")
NO_MODULES: tuple[tuple[Any, type[Exception], tuple[str, ...]], ...] = (
    ("net", TypeError, ("str", "nn.Module")),
    (None, TypeError, ("NoneType", "nn.Module")),
    (3, TypeError, ("int", "nn.Module")),
    (nn.Parameter(torch.zeros(2)), TypeError, ("Parameter", "nn.Module")),
    ([nn.Linear(2, 2), "net"], TypeError, ("str", "nn.Module")),
    ({"net": nn.Linear(2, 2)}, TypeError, ("dict", "nn.Module")),
    (nn.Linear, TypeError, ("type", "nn.Module")),
    ([], ValueError, ("empty list", "at least one")),
    (_twice(nn.Linear(2, 2)), ValueError, ("same module twice", "once")),
    (nn.ModuleList([nn.Linear(2, 2)]), ValueError, ("ModuleList", "forward", "each module")),
    (nn.ModuleDict({"a": nn.Linear(2, 2)}), ValueError, ("ModuleDict", "forward", "each module")),
)
WRONG: tuple[tuple[str, Any, type[Exception], tuple[str, ...]], ...] = (
    ("mesh", "cpu", TypeError, ("str", "init_device_mesh", "None")),
    ("mesh", 2, TypeError, ("int", "init_device_mesh", "None")),
    ("mesh", (2,), TypeError, ("tuple", "init_device_mesh", "None")),
    ("mesh", lambda: dist.group.WORLD, TypeError, ("ProcessGroup", "DeviceMesh")),
    ("mesh", _deep_mesh, ValueError, ("3 dimensions", "(2, 1, 1)", "axes of it")),
    ("dp_mesh_dims", "dp", TypeError, ("str", "DataParallelMeshDims of fullshard")),
    ("dp_mesh_dims", Dims(shard="pp"), ValueError, AXES),
    ("dp_mesh_dims", Dims(shard="dp", replicate="pp"), ValueError, AXES),
    ("reshard_after_forward", "yes", TypeError, ("str",)),
    ("reshard_after_forward", 0.5, TypeError, ("float",)),
    ("reshard_after_forward", KeepUnsharded, TypeError, ("instance",)),
    ("reshard_after_forward", 3, ValueError, ("3", "divide the 2 ranks", "True, False")),
    ("reshard_after_forward", 0, ValueError, ("0", "divide the 2 ranks")),
    ("reshard_after_forward", -1, ValueError, ("-1", "divide the 2")),
    ("shard_placement_fn", Shard(0), TypeError, ("Shard", "function")),
    ("shard_placement_fn", 0, TypeError, ("int", "function")),
    ("shard_placement_fn", _not_a_shard, TypeError, ("int", "weight", "Shard(dim)")),
    ("shard_placement_fn", _no_such_dim, ValueError, ("weight", "2")),
    ("mp_policy", None, TypeError, ("NoneType", "fullshard.policies")),
    ("mp_policy", torch.bfloat16, TypeError, ("dtype", "fullshard.policies")),
    ("mp_policy", MixedPrecisionPolicy, TypeError, ("class MixedPrecisionPolicy", "instance")),
    ("mp_policy", NoOffload(), TypeError, ("NoOffload", "gathered_dtype")),
    ("mp_policy", torch_fsdp.CPUOffloadPolicy(), TypeError, ("CPUOffloadPolicy",)),
    ("offload_policy", None, TypeError, ("NoneType", "stage_in")),
    ("offload_policy", True, TypeError, ("bool", "stage_in")),
    ("offload_policy", CPUOffloadPolicy, TypeError, ("instance",)),
    ("ignored_params", [], TypeError, ("list", "set")),
    ("ignored_params", {"weight"}, TypeError, ("str", "nn.Parameter")),
    ("ignored_params", nn.Linear(2, 2), TypeError, ("Linear", "set")),
    ("prefetch_policy", 2, TypeError, ("int", "in_forward", "in_backward")),
    ("prefetch_policy", None, TypeError, ("NoneType", "in_forward")),
    ("prefetch_policy", NoPrefetch, TypeError, ("class NoPrefetch", "instance")),
    ("wire_policy", torch.bfloat16, TypeError, ("dtype", "gathered_as")),
    ("wire_policy", None, TypeError, ("NoneType", "reduction")),
)


@pytest.mark.parametrize(
    ("module", "error", "words"), NO_MODULES, ids=[row[2][0] for row in NO_MODULES]
)
@distributed(2)
def test_what_is_no_module_is_an_error_that_says_what_came(
    module: Any, error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error, match=says("module", *words)):
        fully_shard(module)
    assert not isinstance(module, list) or not any(isinstance(m, FSDPModule) for m in module)


@pytest.mark.parametrize(
    ("argument", "value", "error", "words"), WRONG, ids=[f"{row[0]}-{row[3][0]}" for row in WRONG]
)
@distributed(2)
def test_a_wrong_argument_is_an_error_that_names_it_and_what_came(
    argument: str, value: Any, error: type[Exception], words: tuple[str, ...]
) -> None:
    linear = nn.Linear(2, 2)
    made = argument == "mesh" and callable(value)  # on the ranks
    arguments: dict[str, Any] = {argument: value() if made else value}
    if argument == "dp_mesh_dims":
        arguments["mesh"] = _deep_mesh()
    with pytest.raises(error, match=says(argument, *words)):
        fully_shard(linear, **arguments)
    assert type(linear) is nn.Linear
    fully_shard(linear)


@distributed(2)
def test_a_module_list_with_a_forward_of_its_own_can_be_sharded() -> None:
    class Chain(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x)
            return x

    chain = fully_shard(Chain([nn.Linear(3, 3), nn.Linear(3, 3)]))
    assert chain(torch.ones(1, 3)).shape == (1, 3)


@pytest.mark.parametrize("first", [fully_shard, replicate], ids=["sharded", "replicated"])
@distributed(2)
def test_a_module_inside_one_whose_group_has_its_parameters_is_an_error(first: Any) -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    first(net)
    for again in (fully_shard, replicate):
        with pytest.raises(ValueError, match=says("Sequential", "0.0.weight", "inner modules fi")):
            again(net[0])
    assert type(net[0]) is nn.Sequential
    net[1] = nn.Linear(2, 2)  # what came since, or was ignored, is in no group
    fully_shard(net[1])


@distributed(2)
def test_modules_that_share_one_can_both_be_sharded() -> None:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    fully_shard(net[0])
    fully_shard(net[1])
    fully_shard(net)(torch.ones(1, 2)).sum().backward()
    assert shared.weight.grad is not None


@pytest.mark.parametrize("first", [fully_shard, replicate], ids=["sharded", "replicated"])
@distributed(2)
def test_a_module_given_in_two_calls_is_an_error(first: Any) -> None:
    linear = first(nn.Linear(2, 2))
    for again in (fully_shard, replicate):
        for given in (linear, [nn.Linear(2, 2), linear]):
            with pytest.raises(ValueError, match=says("Linear", "fully_shard or replicate before")):
                again(given)
    assert linear(torch.ones(1, 2)).shape == (1, 2)


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


@distributed(2)
def test_named_axes_of_the_default_mesh_or_none_are_errors() -> None:
    with pytest.raises(ValueError, match=says("dp_mesh_dims", "'dp'")):
        fully_shard(nn.Linear(2, 2), dp_mesh_dims=Dims(shard="dp"))
    with pytest.raises(ValueError, match=says("names no axis", "shard", "replicate")):
        Dims()


def test_without_a_process_group_the_error_says_to_make_one() -> None:
    linear = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=says("process group", "init_process_group", "mesh=")):
        fully_shard(linear)
    assert type(linear) is nn.Linear


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


# -- parameters that cannot be sharded ------------------------------------------------------------


def _with_a_sparse_one(net: Any) -> dict[str, Any]:
    net.head.register_parameter("table", nn.Parameter(torch.eye(3).to_sparse()))
    return {}


def _with_one_on_this_mesh(net: Any) -> None:
    whole = distribute_tensor(net.head.weight.detach(), cpu_mesh(), [Shard(0)])
    net.head.weight = nn.Parameter(whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_with_a_sparse_one, ("head.table", "sparse", "strided")),
        (_with_one_on_this_mesh, ("head.weight", "DTensor")),
        (torch_fsdp.fully_shard, ("stem.weight", "DTensor")),
    ],
)
@distributed(2)
def test_a_parameter_that_cannot_be_sharded_is_named(
    change: Callable[[Any], object], words: tuple[str, ...]
) -> None:
    net = build()
    change(net)
    with pytest.raises(ValueError, match=says(*words)):
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
