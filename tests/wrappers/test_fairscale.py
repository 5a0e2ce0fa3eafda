"""FairScale's wrapper: its arguments and methods, each against the unsharded model."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import EventKind, EventLog, observe
from fullshard.sharding import FSDPModule
from fullshard.wrappers import fairscale
from fullshard.wrappers.fairscale import (
    FairScaleSettings,
    FullyShardedDataParallel,
    auto_wrap,
    default_auto_wrap_policy,
    enable_wrap,
    equivalent_calls,
    wrap,
)
from support import fsdp1_fronts
from support.fsdp1_fronts import close, equal, gradients, loss_of, mean_gradients, rows
from support.modules import Assembled
from support.parity.compare import full
from support.ranks import distributed
from support.surface.model import Net, batch, build, train
from support.surface.ranks import assert_equal_state, everyone, full_parameters
from wrappers.scripts import fairscale_tutorial


def wrapped(seed: int = 0, **arguments: Any) -> Any:
    """The model, each block in a wrapper of its own, and the rest in the outermost."""
    net: Any = build(seed)
    for index, block in enumerate(net.blocks):
        net.blocks[index] = FullyShardedDataParallel(block, **arguments)
    return FullyShardedDataParallel(net, **arguments)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def full_gradients(model: nn.Module) -> dict[str, Any]:
    return {
        name: None if param.grad is None else full(param.grad)
        for name, param in model.named_parameters()
    }


# -- training -------------------------------------------------------------------------------------

ARGUMENTS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "parameters kept": {"reshard_after_forward": False},
    "everything resharded": {"disable_reshard_on_root": False},
    "no flat parameters": {"flatten_parameters": False},
    "no buckets": {"bucket_cap_mb": 0},
    "gradients on the CPU": {"move_grads_to_cpu": True},
    "parameters on the CPU": {"move_params_to_cpu": True},
    "parameters on the CPU, by the earlier name": {"cpu_offload": True},
    "mixed precision that is none": {
        "mixed_precision": True,
        "compute_dtype": torch.float32,
        "cpu_offload": True,
    },
    "what later releases added": {
        "clear_autocast_cache": True,
        "force_input_to_fp32": True,
        "gradient_predivide_factor": 2.0,
        "limit_all_gather_events": True,
        "limit_reduce_scatter_events": True,
        "should_validate_process_group": False,
        "compute_device": torch.device("cpu"),
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
@distributed(2, 4, matrix=[4])
def test_it_trains_as_the_unsharded_model(name: str) -> None:
    model = wrapped(**ARGUMENTS[name])
    losses = fsdp1_fronts.train(model)
    equal((losses, full_parameters(model)), fsdp1_fronts.unsharded_steps())


@distributed(2, 4, matrix=[4])
def test_gradients_are_means_over_ranks_and_parameters_shards() -> None:
    plain, model = build(), wrapped()
    mean_gradients(plain)
    loss_of(model(rows(0))).backward()
    equal(gradients(model), gradients(plain))
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert model.params_with_grad == list(model.parameters())
    model.zero_grad()
    assert model.params_with_grad == []


@distributed(2, 4, matrix=[4])
def test_parameters_are_gathered_again_in_backward_unless_they_are_kept() -> None:
    def gathers(**arguments: Any) -> int:
        model, log = wrapped(**arguments), EventLog()
        with observe(log):
            model(batch()).sum().backward()
        return len(log.of(EventKind.ALL_GATHER))

    assert gathers() == 5  # two blocks twice, the outermost once
    assert gathers(reshard_after_forward=False) == 3
    assert gathers(disable_reshard_on_root=False) == 6


@distributed(2, 4, matrix=[4])
def test_no_sync_adds_up_and_sends_nothing() -> None:
    plain, model, log = build(), wrapped(), EventLog()
    for step in range(2):
        mean_gradients(plain, step)
    with model.no_sync(), observe(log):
        loss_of(model(rows(0))).backward()
    assert log.of(EventKind.REDUCE_SCATTER) == []
    assert model.params_with_grad == []
    loss_of(model(rows(1))).backward()
    close(gradients(model), gradients(plain))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf, "inf"])
@distributed(2, 4, matrix=[4])
def test_clipping_is_that_of_the_unsharded_model(norm_type: Any) -> None:
    plain, model = build(), wrapped()
    mean_gradients(plain)
    loss_of(model(rows(0))).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, float(norm_type))
    close(model.clip_grad_norm_(0.01, norm_type), expected)
    close(gradients(model), gradients(plain))


@distributed(2, 4, matrix=[4])
def test_a_process_group_of_ones_own_is_where_it_shards() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = FullyShardedDataParallel(nn.Linear(4, 4), alone)
    assert (model.rank, model.world_size) == (0, 1)
    assert model.process_group is alone
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    gradient = full_gradients(model)["weight"]
    assert torch.equal(gradient, torch.full((4, 4), 2.0 * dist.get_rank()))  # not a mean


# -- mixed precision ------------------------------------------------------------------------------


def _see(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.seen = [x.dtype, model.fc.weight.dtype, model.mean.dtype]
    out: torch.Tensor = model.fc(x) * model.mean
    return out


def _seeing() -> nn.Module:
    """Notes in what dtypes it computes."""
    mean, count = nn.Buffer(torch.full((4,), 0.1)), nn.Buffer(torch.zeros((), dtype=torch.int64))
    return Assembled(_see, fc=nn.Linear(4, 4), mean=mean, count=count)


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("fp32_reduce_scatter", [False, True])
@distributed(2, 4, matrix=[4])
def test_mixed_precision_computes_in_the_compute_dtype_and_stores_in_float32(
    compute_dtype: torch.dtype | None, fp32_reduce_scatter: bool
) -> None:
    model = FullyShardedDataParallel(
        _seeing(),
        mixed_precision=True,
        fp32_reduce_scatter=fp32_reduce_scatter,
        compute_dtype=compute_dtype,
    )
    dtype, log = compute_dtype or torch.float16, EventLog()
    with observe(log):
        output = model(torch.ones(2, 4))
        output.sum().backward()
    assert model.module.seen == [dtype] * 3
    assert output.dtype is dtype
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert {grad.dtype for grad in full_gradients(model).values()} == {torch.float32}
    (reduction,) = log.of(EventKind.REDUCE_SCATTER)
    assert (reduction.nbytes >= 20 * 4) == fp32_reduce_scatter
    state = model.state_dict()
    assert state["mean"].dtype is torch.float32 and state["count"].dtype is torch.int64
    assert {state[name].dtype for name in ("fc.weight", "fc.bias")} == {torch.float32}


@distributed(2, 4, matrix=[4])
def test_buffers_have_a_dtype_of_their_own_if_asked() -> None:
    model = FullyShardedDataParallel(_seeing(), mixed_precision=True, buffer_dtype=torch.float32)
    assert model.module.mean.dtype is torch.float32
    assert FullyShardedDataParallel(_seeing()).mean.dtype is torch.float32


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fp32_reduce_scatter": True}, "fp32_reduce_scatter=True requires mixed_precision=True"),
        ({"no_broadcast_optim_state": True}, "no_broadcast_optim_state=True"),
        ({"move_params_to_cpu": True, "move_grads_to_cpu": False}, "move_grads_to_cpu=False"),
    ],
)
def test_arguments_that_contradict_each_other_are_errors(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FairScaleSettings(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": 1}, "mixed_precision is 1; pass True or False"),
        ({"compute_dtype": "half"}, "compute_dtype is 'half'"),
        ({"move_grads_to_cpu": "yes"}, "move_grads_to_cpu is 'yes'"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb is '25'"),
        ({"process_group_reduce_scatter": "other"}, "process_group_reduce_scatter is 'other'"),
        ({"no_such": 1}, "no_such"),
    ],
)
def test_arguments_of_the_wrong_type_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FairScaleSettings(**arguments)


def test_without_torch_distributed_or_a_module_it_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"init_process_group"):
        FullyShardedDataParallel(nn.Linear(1, 1))
    wrong: Any = "model"
    with pytest.raises(TypeError, match=r"module is a str"):
        FullyShardedDataParallel(wrong)


@distributed(2, 4, matrix=[4])
def test_a_module_is_wrapped_once() -> None:
    with pytest.raises(ValueError, match=r"wrapped already"):
        FullyShardedDataParallel(FullyShardedDataParallel(nn.Linear(4, 4)))
    assert everyone("in step") == ["in step"] * dist.get_world_size()


@distributed(2, 4, matrix=[4])
def test_a_module_in_low_precision_computes_in_it_without_mixed_precision() -> None:
    plain = build().bfloat16()
    model = FullyShardedDataParallel(build().bfloat16(), compute_dtype=torch.bfloat16)
    rows = batch().bfloat16()
    assert torch.equal(model(rows), plain(rows))
    assert model.module.steps.dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"without mixed_precision=True, and stem.weight is"):
        FullyShardedDataParallel(build(), compute_dtype=torch.bfloat16)


# -- the wrapped module ---------------------------------------------------------------------------


@distributed(2, 4, matrix=[4])
def test_attributes_items_and_names_are_the_wrapped_modules() -> None:
    tanh = nn.Tanh()
    net: Any = nn.Sequential(nn.Linear(4, 4), tanh)
    net.note = "mine"
    model = FullyShardedDataParallel(net, bucket_cap_mb=3)
    assert model.module is net and isinstance(net, FSDPModule)
    assert model.note == "mine" and model[1] is tanh
    assert model.bucket_cap_mb == 3 and model.compute_dtype is torch.float32
    with pytest.raises(AttributeError, match=r"no_such"):
        _ = model.no_such
    assert [name for name, _ in wrapped().named_parameters()] == [
        name for name, _ in build().named_parameters()
    ]
    assert [name for name, _ in wrapped().named_buffers()] == ["steps"]


@distributed(2, 4, matrix=[4])
def test_repr_shows_rank_and_settings() -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 4), bucket_cap_mb=3)
    text = repr(model)
    where = f"rank={dist.get_rank()}, world_size={dist.get_world_size()}"
    assert f"{where}, reshard_after_forward=True" in text
    assert "compute_dtype=torch.float32" in text and "bucket_cap_mb=3" in text
    assert "flatten_parameters" not in text
    assert "flatten_parameters=True" in repr(
        FullyShardedDataParallel(nn.Linear(4, 4), verbose=True)
    )


@distributed(2, 4, matrix=[4])
def test_summoned_parameters_are_full_and_changes_are_kept_unless_volatile() -> None:
    model = wrapped()
    for volatile in (True, False):
        with model.summon_full_params(volatile=volatile), torch.no_grad():
            found = dict(model.named_parameters())
            assert torch.equal(found["stem.weight"], build().stem.weight)
            found["stem.weight"].zero_()
            found["blocks.0.scale"].zero_()
        after = {name: full(param) for name, param in model.named_parameters()}
        assert bool(after["stem.weight"].any()) == bool(after["blocks.0.scale"].any()) == volatile


# -- state dicts ----------------------------------------------------------------------------------


@distributed(2, 4, matrix=[4])
def test_a_state_dict_is_the_unsharded_models_and_loads_into_either() -> None:
    model, plain = wrapped(7), build()
    state = model.state_dict()
    assert_equal_state(state, build(7).state_dict())
    assert not any(isinstance(value, DTensor) for value in state.values())
    plain.load_state_dict(state)
    other = wrapped()
    result = other.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    torch.testing.assert_close(
        train(other, sgd(other), range(2)), train(plain, sgd(plain), range(2))
    )


@distributed(2, 4, matrix=[4])
def test_a_local_state_dict_is_this_ranks_shards_and_sends_nothing() -> None:
    model, other = wrapped(7), wrapped()
    if dist.get_rank() == 0:  # alone: it would wait for ever if anything were exchanged
        local = model.local_state_dict()
        other.load_local_state_dict(local)
    dist.barrier()
    if dist.get_rank() != 0:
        local = model.local_state_dict()
        other.load_local_state_dict(local)
    assert list(local) == list(build().state_dict())
    for name, param in model.named_parameters():
        assert not isinstance(local[name], DTensor)
        assert torch.equal(local[name], param.to_local())
    assert_equal_state(other.state_dict(), build(7).state_dict())


@distributed(2, 4, matrix=[4])
def test_what_does_not_fit_is_an_error_that_names_it() -> None:
    model = wrapped()
    state = build().state_dict()
    state["head.extra"] = state.pop("head.bias")
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*"head.bias".*"head\.extra"'):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["head.bias"], ["head.extra"])
    with pytest.raises(ValueError, match=r"head\.weight has shape \(9, 6\)"):
        model.load_local_state_dict({**model.local_state_dict(), "head.weight": torch.ones(9, 6)})


@distributed(2, 4, matrix=[4])
def test_a_state_dict_is_put_where_and_given_to_whom_the_arguments_say() -> None:
    model = wrapped(state_dict_on_rank_0_only=True, state_dict_device=torch.device("cpu"))
    state = model.state_dict()
    assert len(state) == (len(build().state_dict()) if dist.get_rank() == 0 else 0)
    assert len(model.local_state_dict()) == len(build().state_dict())


@distributed(2, 4, matrix=[4])
def test_tied_parameters_and_empty_shards_are_saved_on_every_rank() -> None:
    net: Any = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1))
    net[2].weight = net[0].weight  # one row: a rank has none of it
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    assert_equal_state(FullyShardedDataParallel(net).state_dict(), expected)


@distributed(2, 4, matrix=[4])
def test_the_optimizers_state_is_gathered_and_cut() -> None:
    plain, model, other = build(), wrapped(), wrapped()
    train(plain, theirs := sgd(plain), range(2))
    train(model, ours := sgd(model), range(2))
    state = model.gather_full_optim_state_dict(ours)
    assert (state is None) == (dist.get_rank() > 0)
    everywhere = model.gather_full_optim_state_dict(ours, recipient_rank=None)
    assert everywhere is not None
    for name, param in plain.named_parameters():
        momentum = everywhere["state"][name]["momentum_buffer"]
        torch.testing.assert_close(momentum, theirs.state[param]["momentum_buffer"])
    other.load_state_dict(model.state_dict())
    again = sgd(other)
    again.load_state_dict(other.get_shard_from_optim_state_dict(everywhere))
    torch.testing.assert_close(train(other, again, range(2, 4)), train(plain, theirs, range(2, 4)))
    with pytest.raises(ValueError, match=r"recipient_rank is 1"):
        model.gather_full_optim_state_dict(ours, recipient_rank=1)


@distributed(2, 4, matrix=[4])
def test_optimizer_state_by_fairscales_numbers_reaches_the_parameters_that_it_numbered() -> None:
    model = wrapped()
    train(model, ours := sgd(model), range(2))
    named = model.gather_full_optim_state_dict(ours, recipient_rank=None)
    outer = [name for name in named["state"] if not name.startswith("blocks")]
    order = outer + [name for name in named["state"] if name.startswith("blocks")]
    numbered = {
        "state": {number: named["state"][name] for number, name in enumerate(order)},
        "param_groups": [{**named["param_groups"][0], "params": list(range(len(order)))}],
        "param_id_map": dict.fromkeys(range(len(order)), 0),
        "uncollected_local_ids": [],
        "loss_scale": 2.0,
    }
    expected = model.get_shard_from_optim_state_dict(named)
    found = model.get_shard_from_optim_state_dict(numbered)
    assert found["loss_scale"] == 2.0 and found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        mine = found["state"][number]["momentum_buffer"]
        assert torch.equal(full(mine), full(state["momentum_buffer"]))
    with pytest.raises(ValueError, match=r"of 1 parameters, and the model has"):
        model.get_shard_from_optim_state_dict({**numbered, "param_id_map": {0: 0}})
    with pytest.raises(ValueError, match=r"no_broadcast_optim_state=True"):
        model.get_shard_from_optim_state_dict({**numbered, "uncollected_local_ids": [1]})


# -- pickling -------------------------------------------------------------------------------------


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.cross
@pytest.mark.parametrize("copied", [_pickled, _saved, copy.deepcopy])
@pytest.mark.parametrize("stepped", [False, True])
@distributed(2, 4, matrix=[4])
def test_a_wrapped_module_survives_pickling_and_trains_on(copied: Any, stepped: bool) -> None:
    model, plain = wrapped(reshard_after_forward=False), build()
    if stepped:
        train(model, sgd(model), range(1))
        train(plain, sgd(plain), range(1))
        with torch.no_grad():
            model(batch())  # leaves parameters unsharded
    model.blocks[1].eval()
    other = copied(model)
    assert_equal_state(other.state_dict(), model.state_dict())
    assert other.settings == model.settings
    assert other.training and not other.blocks[1].training
    assert isinstance(other.blocks[0], FullyShardedDataParallel)
    expected = train(plain, sgd(plain), range(1, 3))
    torch.testing.assert_close(train(other, sgd(other), range(1, 3)), expected)
    torch.testing.assert_close(train(model, sgd(model), range(1, 3)), expected)  # untouched


@distributed(2, 4, matrix=[4])
def test_frozen_parameters_buffers_ties_and_hooks_survive_pickling() -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4), _seeing(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    net[1].register_forward_hook(_double)
    model = FullyShardedDataParallel(net, mixed_precision=True, compute_dtype=torch.bfloat16)
    other = pickle.loads(cloudpickle.dumps(model))  # for the classes of this file
    assert other[2].weight is other[0].weight
    assert not other[0].bias.requires_grad and other[0].weight.requires_grad
    assert other[1].mean.dtype is torch.bfloat16
    assert other.state_dict()["1.mean"].dtype is torch.float32
    x = torch.ones(2, 4)
    assert torch.equal(other(x), model(x))


def _double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return 2 * output


@distributed(2, 4, matrix=[4])
def test_what_cannot_be_pickled_is_an_error_that_says_what_to_do() -> None:
    own = dist.new_group()
    with pytest.raises(TypeError, match=r"process group of its own.*local_state_dict"):
        pickle.dumps(FullyShardedDataParallel(nn.Linear(4, 4), own))
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    net[0] = FullyShardedDataParallel(net[0])
    with pytest.raises(TypeError, match=r"Linear\.weight is tied to a parameter of another"):
        pickle.dumps(FullyShardedDataParallel(net))


# -- wrapping parts -------------------------------------------------------------------------------


@distributed(2, 4, matrix=[4])
def test_wrap_wraps_inside_enable_wrap_only() -> None:
    assert not isinstance(wrap(nn.Linear(4, 4)), FullyShardedDataParallel)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, bucket_cap_mb=3):
        model: Any = wrap(nn.Linear(4, 4), flatten_parameters=False)
        with enable_wrap(bucket_cap_mb=5):
            assert wrap(nn.Linear(4, 4)).bucket_cap_mb == 5
        assert model.bucket_cap_mb == 3 and not model.flatten_parameters
    assert isinstance(wrap(nn.Linear(4, 4)), nn.Linear)


@distributed(2, 4, matrix=[4])
def test_auto_wrap_wraps_what_is_large_enough() -> None:
    small = functools.partial(default_auto_wrap_policy, min_num_params=70)

    with enable_wrap(small):
        model: Any = auto_wrap(build())
        attention: Any = auto_wrap(nn.Sequential(nn.MultiheadAttention(6, 2), nn.Linear(9, 9)))
        with pytest.raises(ValueError, match=r"wrapped already"):
            auto_wrap(model)
    assert isinstance(model, Net)  # what is left of it is small
    assert all(isinstance(block, FullyShardedDataParallel) for block in model.blocks)
    assert not isinstance(model.stem, FullyShardedDataParallel)
    assert isinstance(attention, FullyShardedDataParallel)
    assert isinstance(attention[0], nn.MultiheadAttention)  # one of those not to look below
    assert isinstance(attention[1], FullyShardedDataParallel)
    assert isinstance(auto_wrap(build()), Net)


@distributed(2, 4, matrix=[4])
def test_batch_norms_are_wrapped_on_their_own_in_full_precision() -> None:
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    tagged: Any = fairscale.auto_wrap_bn(net, wrap_it=False)
    assert tagged is net and tagged[1].wrapper_config["mixed_precision"] is False
    with pytest.raises(ValueError, match=r"1 has a wrapper_config"):
        fairscale.auto_wrap_bn(net)
    net = fairscale.auto_wrap_bn(net, single_rank_pg=True, assert_on_collision=False)
    assert fairscale.get_fsdp_instances(net) == [net[1]]
    assert net[1].world_size == 1 and net[1].weight.shape == (4,)
    model: Any = FullyShardedDataParallel(net, mixed_precision=True, compute_dtype=torch.bfloat16)
    assert fairscale.get_fsdp_instances(model, skip_empty=True) == [model, net[1]]
    model(torch.randn(8, 4)).sum().backward()
    assert model.module[0].weight.grad is not None and net[1].weight.grad is not None


@distributed(2, 4, matrix=[4])
def test_reset_parameters_passes_if_it_is_allowed() -> None:
    model: Any = FullyShardedDataParallel(nn.Linear(4, 4), allow_reset_parameters=True)
    torch.manual_seed(5)
    model.reset_parameters()
    torch.manual_seed(5)
    expected = nn.Linear(4, 4)
    assert torch.equal(model.state_dict()["weight"], expected.weight)
    with pytest.raises(RuntimeError, match=r"needs allow_reset_parameters=True"):
        FullyShardedDataParallel(nn.Linear(4, 4)).reset_parameters()


# -- the equivalent calls -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["the defaults", "parameters kept", "mixed precision", "a group"])
@distributed(2, 4, matrix=[4])
def test_the_equivalent_calls_shard_the_unwrapped_model_alike(name: str) -> None:
    arguments = dict(ARGUMENTS.get(name, {}))
    if name == "mixed precision":
        arguments.update(
            mixed_precision=True, fp32_reduce_scatter=True, compute_dtype=torch.bfloat16
        )
    if name == "a group":
        arguments.update(process_group=dist.new_group(), move_grads_to_cpu=True)
    model = wrapped(**arguments)
    text, net = equivalent_calls(model), build()
    exec(text, {"model": net, "process_group": arguments.get("process_group")})
    assert text.count("fully_shard(") == 3 and isinstance(net, FSDPModule)
    assert train(net, sgd(net), range(3)) == train(model, sgd(model), range(3))
    if name == "mixed precision":
        assert "# and cast floating-point buffers to torch.bfloat16" in text
    with pytest.raises(ValueError, match=r"Linear holds no FullyShardedDataParallel"):
        equivalent_calls(nn.Linear(1, 1))


# -- a script -------------------------------------------------------------------------------------

UNSHARDED = SimpleNamespace(
    enable_wrap=fairscale.enable_wrap,
    wrap=fairscale.wrap,
    auto_wrap=fairscale.auto_wrap,
)


class _Unsharded(nn.Module):
    """What the script needs of a wrapper, without sharding."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def no_sync(self) -> Any:
        return torch.enable_grad()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def gather_full_optim_state_dict(self, optim: torch.optim.Optimizer) -> Any:
        return optim.state_dict()

    def get_shard_from_optim_state_dict(self, state: Any) -> Any:
        return state


UNSHARDED.FullyShardedDataParallel = _Unsharded


@distributed(2, 4, matrix=[4])
def test_a_script_for_fairscale_runs_with_one_import_line_changed(tmp_path: Path) -> None:
    expected = fairscale_tutorial.run(UNSHARDED, str(tmp_path))
    torch.testing.assert_close(fairscale_tutorial.run(fairscale, str(tmp_path)), expected)
    mixed = fairscale_tutorial.run(
        fairscale,
        str(tmp_path),
        mixed_precision=True,
        fp32_reduce_scatter=True,
        compute_dtype=torch.bfloat16,
    )
    torch.testing.assert_close(mixed, expected, rtol=0.05, atol=0.01)
    assert mixed != expected
