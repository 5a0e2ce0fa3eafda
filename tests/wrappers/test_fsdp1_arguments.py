"""The rest of FSDP1's constructor: values to begin with, devices, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fullshard.wrappers.fsdp1 import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fullshard.wrappers.wrap import always_wrap_policy
from support.fsdp1_fronts import (
    OURS,
    TORCH,
    equal,
    full_state,
    hybrid_mesh,
    train,
)
from support.modules import Assembled, in_turn
from support.ranks import cpu_mesh, distributed
from support.surface.model import Block, Net, build


class Norm(nn.Module):
    """A module with parameters and a buffer that initialises itself."""

    offset: torch.Tensor

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, device=device))
        self.register_buffer("offset", torch.empty(6, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(2.0)
            self.offset.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x + self.offset


def deferred(device: str, tied: bool = False) -> Any:
    """A model that can be built on the meta device, with two layers that share a weight."""
    first, last = (nn.Linear(6, 6, device=device) for _ in range(2))
    if tied:
        last.weight = first.weight
    return in_turn(first=first, norm=Norm(device), last=last)


@pytest.mark.parametrize("nested", [False, True])
@distributed(2, 4, matrix=[4])
def test_a_meta_module_initialises_itself_as_under_torchs(nested: bool) -> None:
    found = []
    for front in (OURS, TORCH):
        policy = front.wrap.ModuleWrapPolicy({nn.Linear}) if nested else None
        torch.manual_seed(3)
        model = front.wrapped(deferred("meta"), auto_wrap_policy=policy)
        found.append((full_state(front, model), model.norm.offset))
        train(model, 1)
    equal(found[0], found[1])
    torch.manual_seed(3)
    if not nested:
        equal(found[0][0], {n: p.detach() for n, p in deferred("cpu").named_parameters()})


@pytest.mark.parametrize("nested", [False, True])
@distributed(2, 4, matrix=[4])
def test_an_init_function_is_called_with_the_modules_that_torch_calls_it_with(nested: bool) -> None:
    found = []
    for front in (OURS, TORCH):
        calls: list[str] = []

        def init(module: nn.Module, calls: list[str] = calls) -> None:
            calls.append(type(module).__name__)
            module.to_empty(device="cpu", recurse=False)
            for param in module.parameters(recurse=False):
                nn.init.constant_(param, len(calls))

        policy = front.wrap.ModuleWrapPolicy({nn.Linear}) if nested else None
        model = front.wrapped(deferred("meta"), param_init_fn=init, auto_wrap_policy=policy)
        found.append((calls, full_state(front, model)))
        on_cpu: list[str] = []
        front.wrapped(
            deferred("cpu"), auto_wrap_policy=None, param_init_fn=lambda m, to=on_cpu: to.append("")
        )
        assert on_cpu == []  # nothing to initialise
    assert found[0][0] == found[1][0]
    equal(found[0][1], found[1][1])


@distributed(2, 4, matrix=[4])
def test_tied_parameters_of_a_meta_module_stay_tied() -> None:
    model = OURS.wrapped(deferred("meta", tied=True), auto_wrap_policy=None)
    assert model.last.weight is model.first.weight
    assert len(list(model.parameters())) == 4


@distributed(2, 4, matrix=[4])
def test_what_cannot_be_initialised_is_named() -> None:
    def silent() -> Any:
        inner = Assembled(abs, weight=nn.Parameter(torch.empty(3, device="meta")))
        return in_turn(inner=inner)

    with pytest.raises(ValueError, match=r"inner, a Assembled, is on the meta device"):
        OURS.wrapped(silent(), auto_wrap_policy=None)
    with pytest.raises(ValueError, match=r"inner.weight are still on the meta device"):
        OURS.wrapped(silent(), auto_wrap_policy=None, param_init_fn=lambda module: None)
    with pytest.raises(TypeError, match="param_init_fn is a int"):
        OURS.wrapped(silent(), auto_wrap_policy=None, param_init_fn=3)


def _different() -> Net:
    """The model with other values on each rank."""
    net = build(seed=dist.get_rank())
    net.steps.fill_(dist.get_rank() + 5)
    return net


@pytest.mark.parametrize("policy", [None, {Block}])
@distributed(2, 4, matrix=[4])
def test_all_ranks_begin_with_the_first_ones_values(policy: Any) -> None:
    chosen = None if policy is None else OURS.wrap.ModuleWrapPolicy(policy)
    model = OURS.wrapped(_different(), sync_module_states=True, auto_wrap_policy=chosen)
    assert model.steps.item() == 5
    equal(full_state(OURS, model), {n: p.detach() for n, p in build(0).named_parameters()})


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
@distributed(2, 4)
def test_replicas_begin_with_the_first_ones_values(strategy: str) -> None:
    where: dict[str, Any] = {}
    if strategy == "HYBRID_SHARD":
        where = {"device_mesh": hybrid_mesh()}
    model = OURS.wrapped(_different(), sync_module_states=True, sharding_strategy=strategy, **where)
    equal(full_state(OURS, model), {n: p.detach() for n, p in build(0).named_parameters()})


@distributed(2, 4)
def test_tensor_parallel_shards_begin_with_those_of_the_first_rank_of_their_column() -> None:
    mesh = cpu_mesh((2, dist.get_world_size() // 2), ("dp", "tp"))
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(net, mesh["tp"], plan, src_data_rank=None)  # ranks keep their own values
    model = OURS.wrapped(net, device_mesh=mesh["dp"], sync_module_states=True)
    torch.manual_seed(mesh.get_local_rank("tp"))
    expected = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    parallelize_module(expected, mesh["tp"], plan, src_data_rank=None)
    wanted: list[Any] = list(expected.parameters())
    with OURS.module.summon_full_params(model):
        found = [param.to_local().detach().clone() for param in model.parameters()]
    equal(found, [param.to_local().detach() for param in wanted])


@distributed(2, 4, matrix=[4])
def test_what_is_ignored_is_not_synchronised() -> None:
    net = _different()
    head = {name: param.detach().clone() for name, param in net.head.named_parameters()}
    OURS.wrapped(net, sync_module_states=True, ignored_modules=[net.head])
    equal({name: param.detach() for name, param in net.head.named_parameters()}, head)


@distributed(2, 4, matrix=[4])
def test_parameters_are_the_original_ones_whatever_is_asked() -> None:
    shapes = {name: param.shape for name, param in build().named_parameters()}
    for value in (True, False):
        model = OURS.wrapped(use_orig_params=value)
        assert {name: param.shape for name, param in model.named_parameters()} == shapes


@distributed(2, 4, matrix=[4])
def test_what_was_given_can_be_read() -> None:
    model = OURS.wrapped(
        sharding_strategy="SHARD_GRAD_OP", mixed_precision={"param_dtype": torch.bfloat16}
    )
    assert model.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert model.mixed_precision == MixedPrecision(param_dtype=torch.bfloat16)
    assert model.process_group is dist.group.WORLD
    assert (model.rank, model.world_size) == (dist.get_rank(), dist.get_world_size())
    assert model.compute_device == torch.device("cpu")


@distributed(2)
def test_torchs_own_settings_are_taken_by_their_fields() -> None:
    """Libraries build them before anybody can hand in ours."""
    dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "cast_root_forward_inputs": False}
    prefetch = torch_fsdp.BackwardPrefetch.BACKWARD_POST
    model = FullyShardedDataParallel(
        build(),
        sharding_strategy=cast(Any, torch_fsdp.ShardingStrategy.SHARD_GRAD_OP),
        cpu_offload=cast(Any, torch_fsdp.CPUOffload(offload_params=True)),
        mixed_precision=cast(Any, torch_fsdp.MixedPrecision(**dtypes)),
        backward_prefetch=cast(Any, prefetch),
        auto_wrap_policy=torch_wrap.CustomPolicy(lambda module: isinstance(module, Block)),
    )
    arguments = model.instance.arguments
    assert model.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    ignoring: dict[str, Any] = {"_module_classes_to_ignore": ()}
    assert replace(model.mixed_precision, **ignoring) == MixedPrecision(**dtypes, **ignoring)
    assert arguments.cpu_offload == CPUOffload(offload_params=True)
    assert arguments.backward_prefetch is BackwardPrefetch.BACKWARD_POST
    assert len(FullyShardedDataParallel.fsdp_modules(model)) == 3
    kind = cast(Any, torch_fsdp.StateDictType.SHARDED_STATE_DICT)
    configs = (torch_fsdp.ShardedStateDictConfig(), torch_fsdp.ShardedOptimStateDictConfig())
    before = FullyShardedDataParallel.set_state_dict_type(model, kind, *cast(Any, configs))
    assert before.state_dict_type is StateDictType.FULL_STATE_DICT
    now = FullyShardedDataParallel.get_state_dict_type(model)
    assert now.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert now.state_dict_config == ShardedStateDictConfig()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sharding_strategy": torch_fsdp.MixedPrecision()}, TypeError, "pass a ShardingStrategy"),
    ({"sharding_strategy": 1}, TypeError, "sharding_strategy is 1; pass a ShardingStrategy"),
    ({"cpu_offload": True}, TypeError, "cpu_offload is True; pass a CPUOffload"),
    ({"backward_prefetch": 0}, TypeError, "backward_prefetch is 0"),
    ({"forward_prefetch": None}, TypeError, "forward_prefetch is None; pass a bool"),
    ({"process_group": 3}, TypeError, "process_group is a int; with FULL_SHARD pass one"),
    ({"device_mesh": 3}, TypeError, "device_mesh is a int"),
    ({"ignored_modules": [3]}, TypeError, "ignored_modules holds a int"),
    ({"ignored_modules": 3}, TypeError, "ignored_modules is a int"),
    ({"ignored_states": ["a"]}, TypeError, "ignored_states holds a str"),
    ({"ignored_states": [], "ignored_modules": []}, ValueError, "pass ignored_states, which"),
    ({"device_id": True}, TypeError, "device_id is True"),
    ({"sharding_strategy": "HYBRID_SHARD", "process_group": "two"}, ValueError, "takes a pair"),
]


@distributed(2, 4, matrix=[4])
def test_a_wrong_argument_is_an_error_that_names_it_before_anything_changed() -> None:
    for arguments, error, text in WRONG:
        net = build()
        with pytest.raises(error, match=text):
            OURS.wrapped(net, **arguments)
        assert type(net).__name__ == "Net" and type(net.stem) is nn.Linear
    with pytest.raises(TypeError, match="module is a list"):
        OURS.module([build()])
    wrapped = OURS.wrapped()
    with pytest.raises(ValueError, match="wrapped already"):
        OURS.module(wrapped, auto_wrap_policy=always_wrap_policy)
    with pytest.raises(ValueError, match="is sharded already"):
        OURS.module(nn.Sequential(wrapped), ignored_modules=[wrapped])
    assert BackwardPrefetch.BACKWARD_PRE.name == "BACKWARD_PRE"


@distributed(2, 4)
def test_a_mesh_must_fit_the_strategy() -> None:
    mesh, size = hybrid_mesh(), dist.get_world_size() // 2
    with pytest.raises(ValueError, match=rf"2 dimensions \(2, {size}\), but FULL_SHARD takes 1"):
        OURS.wrapped(device_mesh=mesh)
    with pytest.raises(ValueError, match="HYBRID_SHARD takes 2"):
        OURS.wrapped(device_mesh=mesh["shard"], sharding_strategy="HYBRID_SHARD")
    with pytest.raises(ValueError, match="both process_group and device_mesh"):
        OURS.wrapped(device_mesh=mesh, process_group=dist.group.WORLD)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@distributed(2, 4, matrix=[4])
def test_an_accelerator_that_is_not_there_is_refused() -> None:
    for device_id in (0, torch.device("cuda", 0)):
        with pytest.raises(ValueError, match=rf"device_id is {device_id}, but there is no such"):
            OURS.wrapped(device_id=device_id)


@distributed(2)
def test_a_build_for_an_accelerator_that_is_not_there_trains_on_the_cpu() -> None:
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    with patch.object(torch.accelerator, "current_accelerator", current_accelerator):
        for strategy in ("FULL_SHARD", "HYBRID_SHARD"):
            model = OURS.wrapped(sharding_strategy=strategy, device_id=None)
            equal(train(model), train(OURS.wrapped(sharding_strategy=strategy)))


def test_a_process_without_a_process_group_is_told_what_to_call() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group"):
        OURS.module(build())


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("param_dtype", torch.int64, "floating-point"),
        ("reduce_dtype", "bf16", "floating-point"),
        ("keep_low_precision_grads", 1, "True or False"),
        ("_module_classes_to_ignore", (int,), "subclasses of nn.Module"),
    ],
)
def test_a_wrong_field_of_mixed_precision_is_named(field: str, value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"{field}.*{text}"):
        MixedPrecision(**{field: value})
