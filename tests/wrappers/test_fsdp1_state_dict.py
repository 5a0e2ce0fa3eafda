"""State dicts of a wrapped model: the three kinds, saved and loaded, against torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.comm import EventLog, observe
from fullshard.sharding import fully_shard
from fullshard.wrappers.fsdp1 import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from support.fsdp1_fronts import (
    OURS,
    TORCH,
    Front,
    close,
    equal,
    full_state,
    hybrid_mesh,
    in_rank_order,
    quiet,
    rows,
    steps_of,
    train,
    unsharded_steps,
)
from support.ranks import distributed
from support.surface.model import build

KINDS = list(StateDictType)


def _trained(**arguments: Any) -> Any:
    model = OURS.wrapped(**arguments)
    train(model, 1)
    return model


def _trained_alike(front: Front, **arguments: Any) -> Any:
    """With the same bits from either front."""
    model = in_rank_order(front.wrapped(**arguments))
    train(model, 1)
    return model


def _state(front: Front, model: Any, kind: str, **config: Any) -> dict[str, Any]:
    configs = {
        "FULL_STATE_DICT": front.FullStateDictConfig,
        "LOCAL_STATE_DICT": front.LocalStateDictConfig,
        "SHARDED_STATE_DICT": front.ShardedStateDictConfig,
    }
    kind_set = (front.StateDictType[kind], configs[kind](**config))
    with quiet(), front.module.state_dict_type(model, *kind_set):
        return model.state_dict()


@pytest.mark.cross
@pytest.mark.parametrize("precision", [{}, {"param_dtype": torch.bfloat16}], ids=["full", "bf16"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@distributed(2, 4, matrix=[4])
def test_a_full_state_dict_is_that_of_the_unwrapped_model(strategy: str, precision: Any) -> None:
    found = []
    for front in (OURS, TORCH):
        model = _trained_alike(front, sharding_strategy=strategy, mixed_precision=precision)
        with quiet():
            by_default = model.state_dict()
        equal(dict(by_default), dict(_state(front, model, "FULL_STATE_DICT")))
        found.append(dict(by_default))
        if front is OURS:
            versions = by_default._metadata
            expected = full_state(OURS, model)
    equal(found[0], found[1])
    equal({name: found[0][name] for name in expected}, expected)
    net = build()
    net.load_state_dict(found[0])
    assert versions == getattr(net.state_dict(), "_metadata")  # noqa: B009  # not declared


@pytest.mark.parametrize("offload", [False, True])
@distributed(2, 4, matrix=[4])
def test_only_the_first_rank_gets_the_full_tensors_on_demand(offload: bool) -> None:
    found = []
    for front in (OURS, OURS if offload else TORCH):  # torch's own offload ends the process
        state = _state(
            front, _trained_alike(front), "FULL_STATE_DICT", rank0_only=True, offload_to_cpu=offload
        )
        found.append(dict(state))
    equal(found[0], found[1])
    assert bool(found[0]) is (dist.get_rank() == 0)


@distributed(2, 4)
def test_with_replicas_the_first_rank_of_all_gets_the_full_tensors() -> None:
    mesh = hybrid_mesh()
    model = _trained(sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    expected = full_state(OURS, model)
    state = _state(OURS, model, "FULL_STATE_DICT", rank0_only=True)
    assert bool(state) is (dist.get_rank() == 0)
    if state:
        equal({name: state[name] for name in expected}, expected)


@distributed(2, 4, matrix=[4])
def test_a_sharded_state_dict_holds_dtensors_and_sends_nothing() -> None:
    model = _trained()
    log = EventLog()
    with observe(log):
        state = _state(OURS, model, "SHARDED_STATE_DICT", offload_to_cpu=True)
    assert not list(log.of(*{event.kind for event in log.events}))
    expected = full_state(OURS, model)
    assert list(state) == [*list(build().state_dict())]
    for name, value in expected.items():
        assert isinstance(state[name], DTensor) and state[name].placements == (Shard(0),)
        equal(state[name].full_tensor(), value)
    whole = _state(OURS, _trained(sharding_strategy="NO_SHARD"), "SHARDED_STATE_DICT")
    assert whole["stem.weight"].placements == (Replicate(),)


@distributed(2, 4, matrix=[4])
def test_a_local_state_dict_holds_the_shards_themselves() -> None:
    model = _trained()
    state = _state(OURS, model, "LOCAL_STATE_DICT")
    for name, param in model.named_parameters():
        assert state[name].to_local().data_ptr() == param.to_local().data_ptr()
    assert state["blocks.0.scale"].to_local().numel() == (dist.get_rank() == 0)
    whole = _state(OURS, _trained(sharding_strategy="NO_SHARD"), "LOCAL_STATE_DICT")
    assert type(whole["stem.weight"]) is torch.Tensor


def _changed_by_training(front: Front, model: Any, kind: str, **config: Any) -> set[str]:
    """Whether parameters and buffers of a kept state dict change with the model's."""
    state = _state(front, model, kind, **config)
    before = copy.deepcopy(
        {name: _parts_of(value) for name, value in state.items() if value is not None}
    )
    train(model, 1)
    model.steps.add_(1)
    changed = {
        name for name in before if not all(map(torch.equal, _parts_of(state[name]), before[name]))
    }
    return {"buffer" if name == "steps" else "parameter" for name in changed}


def _parts_of(value: Any) -> list[torch.Tensor]:
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if isinstance(value, DTensor) else value]


@pytest.mark.cross
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"])
@distributed(2, 4, matrix=[4])
def test_what_training_changes_in_a_kept_state_dict_is_what_it_changes_in_torchs(
    kind: str, strategy: str
) -> None:
    found = [
        _changed_by_training(front, _trained_alike(front, sharding_strategy=strategy), kind)
        for front in (OURS, TORCH)
    ]
    assert found[0] == found[1]
    alive = kind == "LOCAL_STATE_DICT" and strategy == "FULL_SHARD"
    assert found[0] == ({"parameter", "buffer"} if alive else {"buffer"})
    alone = OURS.wrapped(process_group=dist.new_subgroups(1)[0], sharding_strategy=strategy)
    assert _changed_by_training(OURS, alone, kind) == {"buffer"}
    kept = _trained_alike(OURS, sharding_strategy=strategy)
    assert _changed_by_training(OURS, kept, kind, offload_to_cpu=True) == set()


def _given(optimizer: torch.optim.Optimizer) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Trains with an optimizer that is there already."""
    return lambda model: optimizer


def _zeroed(**arguments: Any) -> Any:
    net = build()
    with torch.no_grad():
        for param in net.parameters():
            param.zero_()
    net.steps.fill_(7)
    return OURS.wrapped(net, **arguments)


@pytest.mark.cross
@pytest.mark.parametrize("policy", ["leaves", "none", "same"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
@distributed(2, 4, matrix=[4])
def test_what_is_saved_loads_into_a_model_that_is_wrapped_in_another_way(
    kind: str, strategy: str, policy: str
) -> None:
    model = _trained(sharding_strategy=strategy)
    saved = _state(OURS, model, kind)
    chosen = {
        "same": {},
        "none": {"auto_wrap_policy": None},
        "leaves": {"auto_wrap_policy": OURS.wrap.ModuleWrapPolicy({nn.Linear})},
    }[policy]
    other = _zeroed(sharding_strategy=strategy, **chosen)
    with OURS.module.state_dict_type(other, StateDictType[kind]):
        result = other.load_state_dict(saved)
    assert not result.missing_keys and not result.unexpected_keys
    equal(full_state(OURS, other), full_state(OURS, model))
    assert other.steps.item() == 0
    train(other, 1)


@distributed(2, 4, matrix=[4])
def test_full_state_dicts_travel_between_unwrapped_sharded_ours_and_torchs() -> None:
    model = _trained()
    state = model.state_dict()
    torchs = TORCH.wrapped()
    with quiet():
        torchs.load_state_dict(state)
        equal(dict(torchs.state_dict()), dict(state))
        back = _zeroed()
        back.load_state_dict(torchs.state_dict())
    equal(full_state(OURS, back), full_state(OURS, model))
    plain = build()
    plain.load_state_dict(state)
    again = _zeroed()
    again.load_state_dict(plain.state_dict())
    equal(full_state(OURS, again), full_state(OURS, model))
    sharded = fully_shard(build())
    sharded.load_state_dict(_state(OURS, model, "SHARDED_STATE_DICT"))
    third = _zeroed()
    third.load_state_dict(sharded.state_dict())
    equal(full_state(OURS, third), full_state(OURS, model))


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
@distributed(2, 4, matrix=[4])
def test_a_checkpoint_of_each_kind_goes_through_files(kind: str, tmp_path: Path) -> None:
    model = OURS.wrapped()
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, 2, optimizer=_given(optim))
    with OURS.module.state_dict_type(model, StateDictType[kind]):
        saved = {"model": model.state_dict(), "optim": OURS.module.optim_state_dict(model, optim)}
        moment = saved["optim"]["state"]["stem.weight"]["exp_avg"]
        assert isinstance(moment, DTensor) is (kind != "FULL_STATE_DICT")
        dcp.save(saved, checkpoint_id=tmp_path)
    other = _zeroed(auto_wrap_policy=None)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.05)
    train(other, 1, optimizer=_given(fresh))  # there must be state to read into
    with OURS.module.state_dict_type(other, StateDictType[kind]):
        state = {"model": other.state_dict(), "optim": OURS.module.optim_state_dict(other, fresh)}
        dcp.load(state, checkpoint_id=tmp_path)
        other.load_state_dict(state["model"])
        fresh.load_state_dict(OURS.module.optim_state_dict_to_load(other, fresh, state["optim"]))
    for both, its in ((model, optim), (other, fresh)):
        train(both, 2, optimizer=_given(its))
    equal(full_state(OURS, other), full_state(OURS, model))
    dist.barrier()


@pytest.mark.parametrize("whole", [True, False])
@distributed(2, 4, matrix=[4])
def test_torchs_state_dict_functions_save_and_load_by_clean_names(whole: bool) -> None:
    options = StateDictOptions(full_state_dict=whole)
    model = OURS.wrapped()
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, 2, optimizer=_given(optim))
    weights, state = get_state_dict(model, optim, options=options)
    assert list(weights) == list(build().state_dict())
    assert sorted(map(str, state["state"])) == sorted(
        name for name, _ in build().named_parameters()
    )
    other = _zeroed(auto_wrap_policy=None)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.05)
    state = copy.deepcopy(state)
    result = set_state_dict(
        other, fresh, model_state_dict=weights, optim_state_dict=state, options=options
    )
    assert not result.missing_keys and not result.unexpected_keys
    for both, its in ((model, optim), (other, fresh)):
        train(both, 2, optimizer=_given(its))
    equal(full_state(OURS, other), full_state(OURS, model))


@distributed(2, 4, matrix=[4])
def test_a_wrapped_part_of_an_ordinary_module_is_saved_and_loaded_with_it() -> None:
    found = []
    for front in (OURS, TORCH):
        torch.manual_seed(5)
        outer = nn.Sequential(nn.Linear(6, 6), front.wrapped(), nn.Linear(3, 1))
        with quiet():
            state = outer.state_dict()
            outer.load_state_dict({name: value + 1 for name, value in state.items()})
            found.append([dict(state), dict(outer.state_dict())])
    equal(found[0], found[1])


@distributed(2, 4, matrix=[4])
def test_buffers_that_mixed_precision_casts_are_saved_as_they_were() -> None:
    found = []
    for front in (OURS, TORCH):
        net = build()
        net.steps.fill_(3)
        model = front.wrapped(net, mixed_precision={"buffer_dtype": torch.bfloat16})
        model(rows(0)).sum().backward()
        assert model.steps.dtype is torch.bfloat16
        with quiet():
            found.append([model.state_dict()["steps"], model.steps.float()])
    equal(found[0], found[1])
    assert found[0][0].dtype is torch.float32


@distributed(2, 4, matrix=[4])
def test_what_does_not_fit_is_named_as_in_the_unwrapped_model() -> None:
    state = dict(build().state_dict())
    state["nothing"] = state.pop("blocks.1.fc1.weight")
    result = _zeroed().load_state_dict(state, strict=False)
    assert result.missing_keys == ["blocks.1.fc1.weight"]
    assert result.unexpected_keys == ["nothing"]
    with pytest.raises(RuntimeError, match=r"Missing key.* \"blocks.1.fc1.weight\""):
        _zeroed().load_state_dict(state)


@distributed(2, 4, matrix=[4])
def test_the_kind_is_set_for_all_below_and_put_back() -> None:
    model = OURS.wrapped()
    kind = FullyShardedDataParallel
    first = kind.get_state_dict_type(model)
    assert first.state_dict_type is StateDictType.FULL_STATE_DICT
    assert first.state_dict_config == FullStateDictConfig()
    config = ShardedStateDictConfig(offload_to_cpu=True)
    with kind.state_dict_type(nn.Sequential(model), StateDictType.SHARDED_STATE_DICT, config):
        inside = kind.get_state_dict_type(model.blocks[0])
        assert inside.state_dict_type is StateDictType.SHARDED_STATE_DICT
        assert inside.state_dict_config is config
        assert inside.optim_state_dict_config == ShardedOptimStateDictConfig()
    assert kind.get_state_dict_type(model) == first
    before = kind.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig())
    assert before == first
    assert kind.get_state_dict_type(model).state_dict_type is StateDictType.LOCAL_STATE_DICT


@distributed(2, 4, matrix=[4])
def test_a_kind_that_cannot_be_is_refused() -> None:
    model = OURS.wrapped()
    kind = FullyShardedDataParallel
    with pytest.raises(RuntimeError, match="SHARDED_STATE_DICT takes a ShardedStateDictConfig"):
        kind.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, FullStateDictConfig())
    with pytest.raises(RuntimeError, match="takes a FullOptimStateDictConfig"):
        kind.set_state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            optim_state_dict_config=ShardedOptimStateDictConfig(),
        )
    with pytest.raises(TypeError, match="StateDictType"):
        kind.set_state_dict_type(model, "FULL_STATE_DICT")  # type: ignore[arg-type]  # the point
    with pytest.raises(ValueError, match="Linear holds no FullyShardedDataParallel"):
        kind.get_state_dict_type(nn.Linear(1, 1))
    kind.set_state_dict_type(model.blocks[0], StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(RuntimeError, match="different kinds"):
        kind.get_state_dict_type(model)


@distributed(2, 4, matrix=[4])
def test_the_static_methods_give_and_take_the_unsharded_optimizers_state() -> None:
    # torch's own full_optim_state_dict gives exp_avg_sq for exp_avg on the CPU
    net, kind = build(), FullyShardedDataParallel
    adam = torch.optim.AdamW(net.parameters(), lr=0.05)
    unsharded_steps(net, 2, optimizer=_given(adam))
    ids = adam.state_dict()
    model = OURS.wrapped()
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    train(model, 2, optimizer=_given(optim))
    full = kind.full_optim_state_dict(model, optim, rank0_only=False)
    by_id = kind.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model, optim=optim)
    close(by_id["state"], ids["state"])
    first = FullOptimStateDictConfig(rank0_only=True)
    with kind.state_dict_type(model, StateDictType.FULL_STATE_DICT, optim_state_dict_config=first):
        found = kind.optim_state_dict(model, optim)
    assert bool(found) is (dist.get_rank() == 0)
    if found:
        torch.testing.assert_close(found["state"], full["state"], rtol=0, atol=0)
    sharded = kind.sharded_optim_state_dict(model, optim)
    weights = model.state_dict()
    results = []
    ways: list[Callable[[Any, Any], Any]] = [
        lambda m, o: kind.shard_full_optim_state_dict(full, m, optim=o),
        lambda m, o: kind.scatter_full_optim_state_dict(full, m, optim=o),
        lambda m, o: kind.flatten_sharded_optim_state_dict(sharded, m, o),
        lambda m, o: kind.optim_state_dict_to_load(m, o, full),
    ]
    for loadable in ways:
        other = OURS.wrapped(auto_wrap_policy=None)
        other.load_state_dict(weights)
        fresh = torch.optim.AdamW(other.parameters(), lr=0.05)
        fresh.load_state_dict(loadable(other, fresh))
        results.append(steps_of(OURS, other, 2, optimizer=_given(fresh)))
    for result in results[1:]:
        equal(result, results[0])
    expected = steps_of(OURS, model, 2, optimizer=_given(optim))
    equal(results[0], expected)
    close(expected, unsharded_steps(net, 2, optimizer=_given(adam)))
