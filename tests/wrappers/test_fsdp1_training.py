"""Training in FSDP1's wrapper: as the unsharded model, and as torch's own FSDP1."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import CPUOffloadPolicy
from support.fsdp1_fronts import (
    OURS,
    TORCH,
    close,
    equal,
    full_state,
    hybrid_mesh,
    in_rank_order,
    loss_of,
    mean_gradients,
    rows,
    sgd,
    steps_of,
    train,
    unsharded_steps,
    up_to_order,
)
from support.modules import Assembled, in_turn
from support.products import few
from support.ranks import cpu_mesh, distributed, world
from support.surface.model import Block, build

SHARDED = ["FULL_SHARD", "SHARD_GRAD_OP"]
HYBRID = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


@pytest.mark.parametrize("strategy", few([*SHARDED, "NO_SHARD"], "FULL_SHARD", "NO_SHARD"))
@distributed(2, 4, matrix=[4])
def test_a_strategy_trains_as_the_unsharded_model_and_as_torchs(strategy: str) -> None:
    ours = steps_of(OURS, OURS.wrapped(sharding_strategy=strategy))
    up_to_order(ours, steps_of(TORCH, TORCH.wrapped(sharding_strategy=strategy)))
    same = up_to_order if strategy == "NO_SHARD" else equal
    same(ours, unsharded_steps())


def _gathers(strategy: str) -> list[str]:
    model = OURS.wrapped(sharding_strategy=strategy)
    train(model, 1)
    log = EventLog()
    with observe(log):
        train(model, 1)
    return [event.name for event in log.of(EventKind.UNSHARD)]


@distributed(2, 4, matrix=[4])
def test_full_shard_gathers_for_backward_again_and_shard_grad_op_does_not() -> None:
    once = ["(root)", "blocks.0", "blocks.1"]
    assert _gathers("FULL_SHARD") == [*once, "blocks.1", "blocks.0"]
    assert _gathers("SHARD_GRAD_OP") == once


@pytest.mark.cross
@pytest.mark.parametrize("strategy", HYBRID)
@pytest.mark.parametrize("shards", [2, 1])
@distributed(2, 4, matrix=[4])
def test_a_hybrid_strategy_trains_as_the_unsharded_model(strategy: str, shards: int) -> None:
    mesh = hybrid_mesh(replicas=dist.get_world_size() // shards)
    expected = unsharded_steps()
    by_mesh = OURS.wrapped(sharding_strategy=strategy, device_mesh=mesh)
    close(steps_of(OURS, by_mesh), expected)
    pair = (mesh.get_group("shard"), mesh.get_group("replicate"))
    by_pair = OURS.wrapped(sharding_strategy=strategy, process_group=pair)
    close(steps_of(OURS, by_pair), expected)
    if shards > 1:  # else torch's switches to NO_SHARD, and forgets the replicas
        torchs = TORCH.wrapped(sharding_strategy=strategy, process_group=pair)
        close(steps_of(TORCH, torchs), expected)
    assert by_pair.process_group.size() == by_pair.world_size == shards
    assert by_pair.rank == mesh.get_local_rank("shard")
    ranks = torch.arange(dist.get_world_size()).view(-1, shards).tolist()
    assert all(param.device_mesh.mesh.tolist() == ranks for param in by_pair.parameters())


@distributed(2, 4)
def test_a_hybrid_strategy_without_process_groups_shards_inside_a_node() -> None:
    world = dist.get_world_size()
    with patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
        model = OURS.wrapped(sharding_strategy="HYBRID_SHARD")
    meshes = {param.device_mesh for param in model.parameters()}
    assert [mesh.mesh.tolist() for mesh in meshes] == [torch.arange(world).view(-1, 2).tolist()]
    close(steps_of(OURS, model), unsharded_steps())
    with (
        patch.dict("os.environ", LOCAL_WORLD_SIZE="3"),
        pytest.raises(ValueError, match=f"{world} ranks are no multiple of the 3 of this node"),
    ):
        OURS.wrapped(sharding_strategy="HYBRID_SHARD")


@pytest.mark.cross
@pytest.mark.parametrize("strategy", few([*SHARDED, "NO_SHARD"], "FULL_SHARD", "NO_SHARD"))
@distributed(2, 4, matrix=[4])
def test_one_process_group_shards_among_its_own_ranks(strategy: str) -> None:
    mesh = hybrid_mesh()
    group = mesh.get_group("shard")
    arguments: dict[str, Any] = {"sharding_strategy": strategy}
    ours = steps_of(OURS, OURS.wrapped(process_group=group, **arguments))
    equal(ours, steps_of(OURS, OURS.wrapped(device_mesh=mesh["shard"], **arguments)))
    equal(ours, steps_of(TORCH, TORCH.wrapped(process_group=group, **arguments)))


PREFETCHES: list[dict[str, Any]] = [
    {"backward_prefetch": "BACKWARD_POST"},
    {"backward_prefetch": None},
    {"forward_prefetch": True},
]


@distributed(2, 4, matrix=[4])
def test_arguments_that_mean_the_default_or_only_another_order_change_no_bit() -> None:
    expected = steps_of(OURS, OURS.wrapped())
    alike: list[dict[str, Any]] = [
        {"process_group": world()},
        {"device_mesh": cpu_mesh()},
        {"device_mesh": DeviceMesh.from_group(world(), "cpu")},
        *(
            {name: value}
            for name in ("limit_all_gathers", "use_orig_params")
            for value in (True, False)
        ),
        *PREFETCHES,
    ]
    for arguments in alike:
        equal(steps_of(OURS, OURS.wrapped(**arguments)), expected)
    for arguments in PREFETCHES:
        up_to_order(expected, steps_of(TORCH, TORCH.wrapped(**arguments)))


PRECISIONS: list[dict[str, Any]] = [
    {"param_dtype": torch.bfloat16},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    {"reduce_dtype": torch.bfloat16},
    {"param_dtype": torch.float16, "cast_forward_inputs": True},
    {"buffer_dtype": torch.bfloat16},
]


def _scaled(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.saw.append(x.dtype)
    out: torch.Tensor = model.net(x) * model.scale
    return out


def scaled() -> nn.Module:
    """A model with a buffer that takes part, and that says in what dtype it got its inputs."""
    return Assembled(_scaled, net=build(), scale=nn.Buffer(torch.tensor(1 / 3)), saw=[])


@pytest.mark.parametrize(
    "precision",
    few(PRECISIONS, PRECISIONS[1], PRECISIONS[3]),
    ids=lambda each: "-".join(map(str, each)),
)
@distributed(2, 4, matrix=[4])
def test_mixed_precision_trains_as_torchs(precision: dict[str, Any]) -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(scaled(), mixed_precision=precision)
        if front is TORCH:
            model = in_rank_order(model)
        dtypes: list[Any] = []
        result = steps_of(
            front, model, after_backward=lambda m, to=dtypes: to.append(m.scale.dtype)
        )
        gradient_dtypes = {param.dtype for param in result[1].values()}
        state = model.state_dict()
        found.append(
            (model.saw, dtypes, gradient_dtypes, state["scale"].dtype, str(state["scale"].item()))
        )
        if front is OURS:
            mine = result
        elif precision.get("param_dtype") is torch.float16:
            close(mine, result)  # its subnormal numbers are divided before the sum there
        else:
            equal(mine, result)
    assert found[0] == found[1]


@distributed(2, 4, matrix=[4])
def test_the_roots_inputs_are_cast_and_nobody_elses_unless_asked() -> None:
    def mix(model: Any, x: torch.Tensor) -> Any:
        model.saw.append(x.dtype)
        model.second.register_forward_pre_hook(lambda m, a: model.saw.append(a[0].dtype))
        return model.second(model.first(x).double())

    def mixing() -> nn.Module:
        return Assembled(mix, first=nn.Linear(6, 6), second=nn.Linear(6, 6), saw=[])

    for cast_root in (True, False):
        for cast in (True, False):
            found = []
            for front in (OURS, TORCH):
                torch.manual_seed(0)
                model = front.wrapped(
                    mixing(),
                    auto_wrap_policy=front.wrap.ModuleWrapPolicy({nn.Linear}),
                    mixed_precision={
                        "param_dtype": torch.bfloat16,
                        "cast_forward_inputs": cast,
                        "cast_root_forward_inputs": cast_root,
                    },
                )
                try:
                    model(rows(0)).sum().backward()
                    error = ""
                except RuntimeError:
                    error = "dtypes do not fit"
                found.append((error, model.saw))
                if error and front is OURS:
                    model.module.reset_iter_state()
            assert found[0] == found[1], (cast_root, cast)
            assert found[0][1][0] is (torch.bfloat16 if cast_root else torch.float32)


@pytest.mark.parametrize("reduce_dtype", few([None, torch.bfloat16], torch.bfloat16))
@distributed(2, 4, matrix=[4])
def test_low_precision_gradients_are_kept_on_demand(reduce_dtype: torch.dtype | None) -> None:
    precision = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": reduce_dtype,
        "keep_low_precision_grads": True,
    }
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(mixed_precision=precision, sharding_strategy="FULL_SHARD")
        seen = []
        for step in range(3):  # two backwards accumulate, then a fresh one
            loss_of(model(rows(step))).backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            seen.append({grad.dtype for grad in grads})
            if step == 1:
                model.zero_grad()
        found.append(seen)
    assert found[0] == found[1] == [{torch.bfloat16}] * 3


def normed(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> Any:
    """Two layers with a norm between them, and what they saw."""
    torch.manual_seed(0)
    net = in_turn(first=nn.Linear(6, 8), norm=norm(8), last=nn.Linear(8, 3))
    saw = net.saw = []
    net.norm.register_forward_hook(lambda m, a, out: saw.append((a[0].dtype, m.weight.dtype)))
    net.last.register_forward_pre_hook(lambda m, args: saw.append(args[0].dtype))
    return net


@pytest.mark.parametrize("policy", ["class", "size"])
@distributed(2, 4, matrix=[4])
def test_batch_norm_is_kept_apart_in_full_precision(policy: str) -> None:
    found = []
    for front in (OURS, TORCH):
        chosen = front.wrap.ModuleWrapPolicy({nn.Linear})
        if policy == "size":
            chosen = functools.partial(front.wrap.size_based_auto_wrap_policy, min_num_params=30)
        with pytest.warns(UserWarning, match="BatchNorm1d"), warnings.catch_warnings():
            warnings.simplefilter("default")
            model = front.module(
                normed(),
                auto_wrap_policy=chosen,
                mixed_precision=front.MixedPrecision(
                    param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
                ),
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )
        if front is TORCH:
            model = in_rank_order(model)
        assert type(model.norm).__name__ == "FullyShardedDataParallel"
        result = steps_of(front, model)
        found.append((result, model.saw, model.norm.running_mean))
    equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][1][:2] == [(torch.float32, torch.float32), torch.bfloat16]
    equal(found[0][2], found[1][2])
    assert found[0][2].dtype is torch.float32


@pytest.mark.parametrize(
    ("norm", "ignored"), [(nn.LayerNorm, (nn.LayerNorm,)), (nn.BatchNorm1d, ())]
)
@distributed(2, 4, matrix=[4])
def test_which_classes_are_kept_apart_can_be_said(norm: Any, ignored: Any) -> None:
    found = []
    for front in (OURS, TORCH):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = front.wrapped(
                normed(norm),
                auto_wrap_policy=front.wrap.ModuleWrapPolicy({nn.Linear}),
                mixed_precision={
                    "param_dtype": torch.bfloat16,
                    "buffer_dtype": torch.bfloat16,
                    "_module_classes_to_ignore": ignored,
                },
            )
        found.append((steps_of(front, in_rank_order(model)), model.saw))
    equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    dtype = torch.float32 if ignored else torch.bfloat16
    assert found[0][1][:2] == [(dtype, dtype), torch.bfloat16]


@distributed(2, 4, matrix=[4])
def test_shards_on_the_cpu_train_as_torchs() -> None:
    ours = OURS.wrapped(cpu_offload={"offload_params": True})
    assert ours.instance.call.arguments["offload_policy"] == CPUOffloadPolicy()
    theirs = TORCH.wrapped()  # its own offload needs an accelerator
    up_to_order(steps_of(OURS, ours), steps_of(TORCH, theirs))


def _prefetched(**arguments: Any) -> tuple[list[str], list[str]]:
    """What a step gathers, in forward and in backward, each before which module's turn."""
    model = OURS.wrapped(**arguments)
    train(model, 2)
    log = EventLog()
    with observe(log):
        train(model, 1)
    found = [
        f"{event.kind}:{event.name}"
        for event in log.of(
            EventKind.UNSHARD, EventKind.PRE_FORWARD, EventKind.PRE_BACKWARD, EventKind.PREFETCH
        )
    ]
    middle = next(i for i, each in enumerate(found) if each.startswith("pre_backward"))
    return found[:middle], found[middle:]


@distributed(2, 4, matrix=[4])
def test_prefetching_gathers_ahead_where_asked() -> None:
    forward, backward = _prefetched(backward_prefetch="BACKWARD_PRE", forward_prefetch=True)
    on_demand, late = _prefetched(backward_prefetch="BACKWARD_POST")
    _, never = _prefetched(backward_prefetch=None)
    _, before = _prefetched()

    def at(events: list[str], event: str) -> int:
        return events.index(event)

    assert at(forward, "unshard:blocks.1") < at(forward, "pre_forward:blocks.1")
    assert at(on_demand, "unshard:blocks.1") > at(on_demand, "pre_forward:blocks.1")
    for events in (backward, before):
        assert at(events, "unshard:blocks.0") < at(events, "pre_backward:blocks.0")
    for events in (late, never):
        assert at(events, "unshard:blocks.0") > at(events, "pre_backward:blocks.0")


@pytest.mark.parametrize("strategy", few([*SHARDED, "NO_SHARD"], "FULL_SHARD", "NO_SHARD"))
@distributed(2, 4, matrix=[4])
def test_no_sync_accumulates_as_torchs_and_as_the_unsharded_model(strategy: str) -> None:
    found = []
    for front in (OURS, TORCH):
        model = front.wrapped(sharding_strategy=strategy)
        with model.no_sync():
            with model.no_sync():
                loss_of(model(rows(0))).backward()
            loss_of(model(rows(1))).backward()
        if front is OURS and strategy != "SHARD_GRAD_OP":  # which keeps the full parameters
            assert all(param.grad is None for param in model.parameters())
        loss_of(model(rows(2))).backward()
        sgd(model).step()
        found.append(full_state(front, model))
    up_to_order(found[0], found[1])
    net = build()
    for step in range(3):
        mean_gradients(net, step)
    sgd(net).step()
    close(found[0], {name: param.detach() for name, param in net.named_parameters()})


@distributed(2, 4, matrix=[4])
def test_no_sync_sends_nothing_but_gathers_and_keeps_what_a_strategy_keeps() -> None:
    for strategy, gathers in (("FULL_SHARD", 5), ("SHARD_GRAD_OP", 0)):
        model = OURS.wrapped(sharding_strategy=strategy)
        log = EventLog()
        with model.no_sync():
            loss_of(model(rows(0))).backward()
            with observe(log):
                loss_of(model(rows(1))).backward()
        assert not log.of(EventKind.REDUCE)
        assert len(log.of(EventKind.UNSHARD)) == gathers
        with observe(log):
            loss_of(model(rows(2))).backward()
        assert len(log.of(EventKind.REDUCE)) == 3
        assert len(log.of(EventKind.RESHARD)) >= 3


@distributed(2, 4, matrix=[4])
def test_no_sync_of_an_instance_inside_another_holds_for_it_alone() -> None:
    model = OURS.wrapped()
    with model.blocks[0].no_sync():
        loss_of(model(rows(0))).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert all((grad is None) == name.startswith("blocks.0") for name, grad in grads.items())


@pytest.mark.cross
@pytest.mark.parametrize("norm_type", few([1, 1.5, 2, 3.0, math.inf, "inf"], 1, 2, math.inf))
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@distributed(2, 4, matrix=[4])
def test_the_norm_and_the_clipped_gradients_are_torchs(strategy: str, norm_type: Any) -> None:
    norm_type = float(norm_type) if norm_type != "inf" else norm_type
    found = []
    for front in (OURS, TORCH):
        order = float(norm_type) if front is TORCH else norm_type
        model = front.wrapped(sharding_strategy=strategy)
        found.append(
            steps_of(front, model, 2, after_backward=lambda m, o=order: m.clip_grad_norm_(0.05, o))
        )
    close(found[0], found[1])


def _tied() -> Any:
    """Two layers of one weight around a block, of which a part is frozen."""
    torch.manual_seed(0)
    model = in_turn(first=nn.Linear(6, 6), block=Block(), last=nn.Linear(6, 6))
    model.last.weight = model.first.weight
    model.block.fc1.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("strategy", few([*SHARDED, "NO_SHARD"], "FULL_SHARD", "NO_SHARD"))
@distributed(2, 4, matrix=[4])
def test_tied_and_frozen_parameters_train_wherever_the_instances_part(strategy: str) -> None:
    expected = unsharded_steps(_tied())
    same = up_to_order if strategy == "NO_SHARD" else equal
    for kinds in ({nn.Linear}, {Block}):
        policy = OURS.wrap.ModuleWrapPolicy(kinds)
        model = OURS.wrapped(_tied(), sharding_strategy=strategy, auto_wrap_policy=policy)
        assert model.last.weight is model.first.weight
        same(steps_of(OURS, model), expected)
        state = model.state_dict()
        assert list(state) == list(_tied().state_dict())
        equal(state["last.weight"], state["first.weight"])


@distributed(2, 4, matrix=[4])
def test_children_are_wrapped_before_parents_and_the_root_is_found_last() -> None:
    wrapped: list[str] = []
    kind = OURS.module
    original = kind.__init__

    def record(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        wrapped.append(f"begin {type(module).__name__}")
        original(self, module, *args, **kwargs)
        wrapped.append(f"end {type(module).__name__.removeprefix('FSDP')}")

    with patch.object(kind, "__init__", record):
        model = OURS.wrapped()
    block = ["begin Block", "end Block"]
    assert wrapped == ["begin Net", *block, *block, "end Net"]
    train(model, 1)
    assert model.check_is_root()
    assert not any(block.check_is_root() for block in model.blocks)
