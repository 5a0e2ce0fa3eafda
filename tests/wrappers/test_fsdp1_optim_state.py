"""FSDP1's static methods of optimizer state: the functions of ``fullshard.checkpoint``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

from fullshard import checkpoint
from fullshard.wrappers.fsdp1 import FullyShardedDataParallel, OptimStateKeyType
from support.fsdp1_fronts import (
    OURS,
    TORCH,
    Front,
    close,
    equal,
    quiet,
    rows,
    train,
)
from support.parity.compare import full
from support.products import few
from support.ranks import distributed
from support.surface.model import build


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, eps=0.05)


def _train(model: Any, optim: torch.optim.Optimizer) -> None:
    train(model, 2, optimizer=lambda _: optim)


def _two_groups(model: Any) -> list[dict[str, Any]]:
    params = dict(model.named_parameters())
    vectors = [param for name, param in params.items() if name.endswith(("bias", "scale"))]
    matrices = [param for name, param in params.items() if name.endswith("weight")]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "lr": 0.02}]


def test_the_methods_are_the_functions_of_the_checkpoint_package() -> None:
    names = [name for name in checkpoint.__all__ if name.endswith(("state_dict", "dict_to_load"))]
    assert len(names) == 8
    for name in names:
        assert getattr(FullyShardedDataParallel, name) is getattr(checkpoint, name)


@distributed(2, 4, matrix=[4])
def test_parameters_may_be_given_instead_of_the_optimizer_and_the_group_by_name() -> None:
    kind, world = FullyShardedDataParallel, dist.group.WORLD
    model = OURS.wrapped()
    optim = adamw(_two_groups(model))
    _train(model, optim)
    inputs = _two_groups(model)
    state = kind.full_optim_state_dict(model, optim, inputs, rank0_only=False, group=world)
    expected = kind.full_optim_state_dict(model, optim, rank0_only=False)
    equal(state["state"], expected["state"])
    assert state["param_groups"] == expected["param_groups"]
    loadable = kind.shard_full_optim_state_dict(state, model, optim=optim)
    for again in (
        kind.shard_full_optim_state_dict(state, model, inputs),
        kind.scatter_full_optim_state_dict(state, model, inputs, group=world),
        kind.flatten_sharded_optim_state_dict(
            kind.sharded_optim_state_dict(model, optim, group=world), model, optim
        ),
        kind.optim_state_dict_to_load(model, optim, state, group=world),
    ):
        assert again["param_groups"] == loadable["param_groups"]
        for key, found in loadable["state"].items():
            assert again["state"][key].keys() == found.keys()
            for name, value in found.items():
                assert torch.equal(_local(again["state"][key][name]), _local(value))
    ids = kind.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model, inputs)
    names = kind.rekey_optim_state_dict(ids, OptimStateKeyType.PARAM_NAME, model, inputs)
    equal(names["state"], state["state"])


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _snapshot(value: Any) -> Any:
    """What nested dicts and lists hold now: of a parameter who it is, of other tensors the values.

    As lists: the order of keys counts.
    """
    if isinstance(value, torch.Tensor):
        return id(value) if isinstance(value, nn.Parameter) else full(value).tolist()
    if isinstance(value, dict):
        return [type(value), [(key, _snapshot(each)) for key, each in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value), [_snapshot(each) for each in value]]
    return value


@pytest.mark.parametrize("keys", few(OptimStateKeyType, OptimStateKeyType.PARAM_NAME))
@distributed(2)
def test_nothing_that_a_user_passes_is_changed_nor_by_steps_after_it_was_loaded(
    keys: OptimStateKeyType,
) -> None:
    kind = FullyShardedDataParallel
    model = OURS.wrapped()
    inputs = _two_groups(model)
    optim = adamw(inputs)
    _train(model, optim)
    groups = _snapshot(inputs)
    parts = kind.sharded_optim_state_dict(model, optim)
    whole = kind.full_optim_state_dict(model, optim, inputs, rank0_only=False)
    whole = kind.rekey_optim_state_dict(whole, keys, model, inputs)
    before = _snapshot([parts, whole])
    for loadable in (
        kind.shard_full_optim_state_dict(whole, model, inputs),
        kind.scatter_full_optim_state_dict(whole, model, inputs, optim),
        kind.flatten_sharded_optim_state_dict(parts, model, optim),
        kind.optim_state_dict_to_load(model, optim, whole),
    ):
        again = adamw(_two_groups(model))
        again.load_state_dict(loadable)
        _train(model, again)
    kind.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_NAME, model, inputs)
    kind.optim_state_dict(model, optim, optim.state_dict())
    assert _snapshot(inputs) == _snapshot(optim.param_groups) == groups
    assert _snapshot([parts, whole]) == before


@pytest.mark.parametrize(
    "way", few(["shard", "scatter", "flatten", "to_load"], "scatter", "to_load")
)
@distributed(2, 4, matrix=[4])
def test_parameters_outside_any_instance_are_left_to_those_who_manage_them(way: str) -> None:
    found = []
    for front in (OURS, TORCH):
        saved = _loaded_with_a_spare_parameter(front, way)
        spare = saved["state"].pop("missing")
        assert spare not in [each for group in saved["param_groups"] for each in group["params"]]
        found.append([group["params"] for group in saved["param_groups"]])
    assert found[0] == found[1]


def _loaded_with_a_spare_parameter(front: Front, way: str) -> dict[str, Any]:
    """What is to be loaded by an optimizer of one parameter more than the one that was saved."""
    kind = front.module
    outer = nn.Sequential(front.wrapped(), nn.Linear(3, 3))
    optim = adamw(outer.parameters())
    outer(rows(0)).sum().backward()
    other = nn.Sequential(front.wrapped(), nn.Linear(3, 3))
    with quiet():
        optim.step()
        other[1].register_parameter("spare", nn.Parameter(torch.ones(3)))
        fresh = adamw(other.parameters())
        if way == "flatten":
            state = kind.sharded_optim_state_dict(outer, optim)
            loadable = kind.flatten_sharded_optim_state_dict(state, other, optim=fresh)
        elif way == "scatter":
            state = kind.full_optim_state_dict(outer, optim)
            loadable = kind.scatter_full_optim_state_dict(state, other, optim=fresh)
        else:
            state = kind.full_optim_state_dict(outer, optim, rank0_only=False)
            loadable = (
                kind.shard_full_optim_state_dict(state, other, optim=fresh)
                if way == "shard"
                else kind.optim_state_dict_to_load(other, fresh, state)
            )
    ids = {id(param): index for index, param in enumerate(fresh.param_groups[0]["params"])}
    spare = ids[id(other[1].spare)]
    loadable["param_groups"][0]["params"].append(spare)
    first = next(iter(loadable["state"].values()))
    loadable["state"][spare] = {key: torch.zeros(()) for key in first}
    fresh.load_state_dict(copy.deepcopy(loadable))  # whoever manages it adds its state
    loadable["param_groups"][0]["params"].remove(spare)
    del loadable["state"][spare]
    return {**loadable, "state": {**loadable["state"], "missing": spare}}


@pytest.mark.cross
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("saver", [OURS, TORCH], ids=["ours", "torchs"])
@distributed(2, 4, matrix=[4])
def test_what_torchs_reader_of_sharded_optimizer_state_gives_is_loaded(
    saver: Front, strategy: str, tmp_path: Path
) -> None:
    model = saver.wrapped()
    optim = adamw(model.parameters())
    _train(model, optim)
    with quiet():
        saver.module.set_state_dict_type(model, saver.StateDictType.SHARDED_STATE_DICT)
        saved = {"model": model.state_dict()}
        saved["optimizer"] = saver.module.optim_state_dict(model, optim)
        dcp.save(saved, checkpoint_id=tmp_path)
    other = OURS.wrapped(build(7), sharding_strategy=strategy)
    other.load_state_dict(saved["model"])  # as it is in memory, too: torch's is a ShardedTensor
    fresh = adamw(other.parameters())
    kind = OURS.module
    with quiet(), kind.state_dict_type(other, OURS.StateDictType.SHARDED_STATE_DICT):
        reader = dcp.FileSystemReader(tmp_path)
        read = load_sharded_optimizer_state_dict(other.state_dict(), "optimizer", reader)
        fresh.load_state_dict(kind.optim_state_dict_to_load(other, fresh, read["optimizer"]))
    for both, its in ((model, optim), (other, fresh)):
        _train(both, its)
    with quiet():
        saver.module.set_state_dict_type(model, saver.StateDictType.FULL_STATE_DICT)
        close(dict(other.state_dict()), dict(model.state_dict()))
    dist.barrier()
