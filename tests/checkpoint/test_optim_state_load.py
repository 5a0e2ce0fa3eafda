"""Loading an optimizer's state: from any sharding into any other, or none, and training on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    init_from_local_shards,
)
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import (
    OptimStateKind,
    OptimStateOptions,
    flatten_sharded_optim_state_dict,
    full_optim_state_dict,
    optim_state_dict,
    optim_state_dict_to_load,
    scatter_full_optim_state_dict,
    set_optim_state_options,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from fullshard.sharding import (
    RankMismatchError,
    full_state_dict,
    fully_shard,
)
from support import tp_model
from support.named_optimizer import NamedAdamW
from support.parity.compare import full
from support.products import few
from support.ranks import cpu_mesh, distributed, run_on_ranks
from support.surface.model import build, sharded, train
from support.surface.ranks import everyone
from support.surface.wrappings import (
    WRAPPINGS,
    Wrapped,
    adamw,
    every_layer,
    hybrid,
    tied,
    two_groups,
)

BEFORE, AFTER = range(2), range(2, 4)


def uninterrupted(groups: Callable[[Any], Any] = lambda net: net.parameters()) -> list[float]:
    """The losses of training that is not saved and loaded: the definition."""
    plain = build()
    stepped = adamw(groups(plain))
    return train(plain, stepped, BEFORE) and train(plain, stepped, AFTER)


def weights_then_losses(
    net: Any, stepped: torch.optim.Optimizer, weights: dict[str, Any], state: dict[str, Any]
) -> list[float]:
    """The losses after loading both."""
    net.load_state_dict(weights)
    stepped.load_state_dict(state)
    return train(net, stepped, AFTER)


def saved(wrapping: str = "blocks", groups: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and state after some steps, whole, on every rank."""
    net = WRAPPINGS[wrapping](build())
    stepped = adamw(net.parameters() if groups is None else groups(net))
    train(net, stepped, BEFORE)
    if wrapping == "unwrapped":
        return net.state_dict(), full_optim_state_dict(net, stepped, rank0_only=False)
    weights = full_state_dict(net, rank0_only=False)
    return weights, full_optim_state_dict(net, stepped, rank0_only=False)


def assert_trains_on(losses: list[float]) -> None:
    torch.testing.assert_close(losses, uninterrupted())


# -- full state dicts -----------------------------------------------------------------------------


@pytest.mark.parametrize("target", WRAPPINGS)
@distributed(2, 4, matrix=[4])
def test_a_state_from_one_wrapping_trains_on_in_another(target: str) -> None:
    weights, state = saved("every layer" if target == "blocks" else "blocks")
    net = WRAPPINGS[target](build(7))
    stepped = adamw(net.parameters())
    part = shard_full_optim_state_dict(state, net, optim=stepped)
    for found in (value for each in part["state"].values() for value in each.values()):
        assert target != "unwrapped" or not isinstance(found, DTensor)
    assert_trains_on(weights_then_losses(net, stepped, weights, part))


@distributed(2, 4, matrix=[2])
def test_a_state_trains_on_in_a_hybrid_model_and_comes_back() -> None:
    weights, state = saved()
    net = hybrid(build(7))
    stepped = adamw(net.parameters())
    for load in (shard_full_optim_state_dict, scatter_full_optim_state_dict):
        given: Any = state if load is shard_full_optim_state_dict or dist.get_rank() == 0 else {}
        part = load(given, net, optim=stepped)
        assert_trains_on(weights_then_losses(net, stepped, weights, part))
    again = full_optim_state_dict(net, stepped, rank0_only=False)
    assert again["state"].keys() == state["state"].keys()


@distributed(2, 4, matrix=[4])
def test_the_state_dict_of_an_ordinary_optimizer_loads_by_its_ids() -> None:
    plain = build()
    stepped = adamw(plain.parameters())
    train(plain, stepped, BEFORE)
    net = sharded(build(7))
    ours = adamw(net.parameters())
    for part in (
        shard_full_optim_state_dict(stepped.state_dict(), net, optim=ours),
        shard_full_optim_state_dict(stepped.state_dict(), net),
        shard_full_optim_state_dict(stepped.state_dict(), net, list(net.parameters())),
    ):
        assert_trains_on(weights_then_losses(net, ours, plain.state_dict(), part))


@distributed(2, 4, matrix=[4])
def test_no_state_yet_loads() -> None:
    net = sharded(build())
    stepped = adamw(net.parameters())
    state = full_optim_state_dict(net, stepped, rank0_only=False)
    other = sharded(build())
    ours = adamw(other.parameters())
    ours.load_state_dict(shard_full_optim_state_dict(state, other, optim=ours))
    assert train(other, ours, BEFORE) == train(net, stepped, BEFORE)


# -- parameters and groups ------------------------------------------------------------------------


def _other_way_round(net: Any) -> list[dict[str, Any]]:
    first, second = two_groups(net)
    return [{"params": second["params"][::-1]}, {"params": first["params"]}]


def _split(net: Any) -> list[dict[str, Any]]:
    first, second = two_groups(net)
    return [{"params": first["params"][:2]}, second, {"params": first["params"][2:]}]


@pytest.mark.parametrize("groups", [two_groups, _other_way_round, _split])
@distributed(2, 4, matrix=[4])
def test_groups_are_found_by_the_names_of_their_parameters(groups: Any) -> None:
    weights, state = saved(groups=two_groups)
    net = every_layer(build(7))
    stepped = adamw(groups(net))
    part = shard_full_optim_state_dict(state, net, optim=stepped)
    losses = weights_then_losses(net, stepped, weights, part)
    torch.testing.assert_close(losses, uninterrupted(two_groups))
    assert sorted({group["lr"] for group in stepped.param_groups}) == [0.02, 0.1]


@distributed(2, 4, matrix=[4])
def test_groups_that_join_different_options_are_an_error_that_names_them() -> None:
    _, state = saved(groups=two_groups)
    net = sharded(build())
    with pytest.raises(ValueError, match=r"group 0.*stem\.weight.*different options"):
        shard_full_optim_state_dict(state, net, optim=adamw(net.parameters()))


@distributed(2, 4, matrix=[4])
def test_parameters_that_only_one_side_has_are_errors_that_name_them() -> None:
    _, state = saved()
    net = sharded(build())
    fewer = adamw([param for name, param in net.named_parameters() if name != "head.bias"])
    with pytest.raises(ValueError, match=r"state for head\.bias, which the optimizer lacks"):
        shard_full_optim_state_dict(state, net, optim=fewer)
    del state["state"]["stem.weight"]
    state["param_groups"][0]["params"].remove("stem.weight")
    with pytest.raises(ValueError, match=r"stem\.weight, which the state dict lacks"):
        shard_full_optim_state_dict(state, net, optim=adamw(net.parameters()))
    with pytest.raises(ValueError, match=r"has id 99"):
        shard_full_optim_state_dict({"state": {99: {}}}, net, optim=fewer)
    with pytest.raises(TypeError, match=r"without 'state'"):
        shard_full_optim_state_dict({}, net, optim=fewer)


@distributed(2, 4, matrix=[4])
def test_unmanaged_frozen_and_unused_parameters_train_on() -> None:
    def prepared(seed: int = 0) -> Any:
        net = build(seed)
        net.stem.weight.requires_grad_(False)
        net.head.register_parameter("spare", nn.Parameter(torch.ones(3)))
        return net

    plain = prepared()
    theirs = adamw(plain.parameters())
    train(plain, theirs, BEFORE)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    state = full_optim_state_dict(plain, theirs, rank0_only=False)
    net = prepared(7)
    net = sharded(net, ignored_params={net.head.weight})
    ours = adamw(net.parameters())
    for give in (shard_full_optim_state_dict, scatter_full_optim_state_dict):
        part = give(state, net, optim=ours)
        assert not isinstance(part["state"][12]["exp_avg"], DTensor)  # head.weight
    losses = weights_then_losses(net, ours, weights, part)
    torch.testing.assert_close(losses, train(plain, theirs, AFTER))


@pytest.mark.parametrize("scattered", [False, True])
@distributed(2, 4, matrix=[4])
def test_tied_parameters_and_those_without_a_dim_train_on(scattered: bool) -> None:
    torch.manual_seed(0)
    plain, net = tied(), tied()
    theirs = adamw(plain.parameters())
    train(plain, theirs, BEFORE)
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    state = full_optim_state_dict(plain, theirs, rank0_only=False)
    state["state"]["two.weight"] = state["state"].pop("one.weight")  # its other name
    fully_shard(net.one)
    fully_shard(net)
    ours = adamw(net.parameters())
    give = scatter_full_optim_state_dict if scattered else shard_full_optim_state_dict
    losses = weights_then_losses(net, ours, weights, give(state, net, optim=ours))
    torch.testing.assert_close(losses, train(plain, theirs, AFTER))


@distributed(2, 4, matrix=[4])
def test_none_lists_and_state_of_no_parameter_are_loaded_as_they_are() -> None:
    _, state = saved()
    state["state"]["stem.weight"].update(none=None, word="x", pair=[1, torch.ones(2)])
    state["state"]["my counter"] = 3
    net = sharded(build())
    for give in (shard_full_optim_state_dict, scatter_full_optim_state_dict):
        part = give(state, net)
        found = part["state"][0]
        assert found["none"] is None and found["word"] == "x"
        assert found["pair"][0] == 1 and torch.equal(found["pair"][1], torch.ones(2))
        assert part["state"]["my counter"] == 3


@pytest.mark.parametrize("hidden", few([8, 7], 7), ids=["even", "uneven"])
@distributed(2, 4)
def test_tensor_parallel_parameters_travel_too_and_only_rank_0_has_them_whole(hidden: int) -> None:
    def stepped(model: Any, steps: range) -> Any:
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1)
        for step in steps:
            model(tp_model.batch(step)).square().mean().backward()
            optim.step()
            optim.zero_grad()
        return optim

    mesh = cpu_mesh((dist.get_world_size() // 2, 2), ("dp", "tp"))

    def parallel() -> Any:
        model = tp_model.parallelize(tp_model.build(hidden), mesh["tp"])
        return tp_model.shard(model, fully_shard, mesh=mesh["dp"])

    plain = tp_model.build(hidden)
    theirs = full_optim_state_dict(plain, stepped(plain, BEFORE), rank0_only=False)
    model = parallel()
    optim = stepped(model, BEFORE)
    with patch.object(DTensor, "full_tensor", side_effect=AssertionError("whole on every rank")):
        first = full_optim_state_dict(model, optim)
    assert bool(first) == (dist.get_rank() == 0)
    state = full_optim_state_dict(model, optim, rank0_only=False)
    for name, found in theirs["state"].items():
        torch.testing.assert_close(state["state"][name], found)
        if first:
            torch.testing.assert_close(first["state"][name], found)
    again, other = parallel(), parallel()
    for net, give in ((again, shard_full_optim_state_dict), (other, scatter_full_optim_state_dict)):
        ours = adamw(net.parameters())
        given: Any = state if give is shard_full_optim_state_dict or dist.get_rank() == 0 else None
        ours.load_state_dict(give(given, net, optim=ours))
        for name, param in net.named_parameters():
            assert torch.equal(full(ours.state[param]["exp_avg"]), state["state"][name]["exp_avg"])


# -- scattered ------------------------------------------------------------------------------------


@distributed(2, 4, matrix=[4])
def test_scattering_gives_what_sharding_gives_and_reads_rank_0s_alone() -> None:
    weights, state = saved()
    net = every_layer(build(7))
    stepped = adamw(net.parameters())
    expected = shard_full_optim_state_dict(state, net, optim=stepped)
    given = state if dist.get_rank() == 0 else None
    part = scatter_full_optim_state_dict(given, net, optim=stepped)
    assert part["param_groups"] == expected["param_groups"]
    for key, found in expected["state"].items():
        for name, value in found.items():
            mine = part["state"][key][name]
            assert type(mine) is type(value)
            if isinstance(value, DTensor):
                assert mine.placements == value.placements
                assert torch.equal(mine.to_local(), value.to_local())
    assert_trains_on(weights_then_losses(net, stepped, weights, part))


@distributed(2, 4, matrix=[4])
def test_an_error_of_rank_0_is_raised_on_every_rank() -> None:
    _, state = saved()
    net = sharded(build())
    stepped = adamw(net.parameters())
    expected = ValueError if dist.get_rank() == 0 else RankMismatchError
    broken = {**state, "state": {**state["state"], 99: {}}}
    with pytest.raises(expected, match=r"has id 99"):
        scatter_full_optim_state_dict(broken, net, optim=stepped)
    with pytest.raises(expected, match=r"holds a DTensor"):
        scatter_full_optim_state_dict(
            {**state, "state": {"stem.weight": {"exp_avg": net.stem.weight}}}, net, optim=stepped
        )
    assert everyone("in step") == ["in step"] * dist.get_world_size()


# -- sharded and local ----------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["blocks", "columns", "replicas", "unwrapped"])
@distributed(2, 4, matrix=[4])
def test_a_sharded_state_is_cut_anew_for_another_sharding(target: str) -> None:
    net = sharded(build())
    stepped = adamw(net.parameters())
    train(net, stepped, BEFORE)
    state, weights = sharded_optim_state_dict(net, stepped), full_state_dict(net, rank0_only=False)
    other = WRAPPINGS[target](build(7))
    ours = adamw(other.parameters())
    part = flatten_sharded_optim_state_dict(state, other, ours)
    assert_trains_on(weights_then_losses(other, ours, weights, part))


@distributed(2, 4, matrix=[4])
def test_sharded_states_that_differ_between_ranks_raise_on_every_rank() -> None:
    net = sharded(build())
    stepped = adamw(net.parameters())
    train(net, stepped, BEFORE)
    state = sharded_optim_state_dict(net, stepped)
    if dist.get_rank() == 1:
        del state["state"]["stem.weight"]
    with pytest.raises(RankMismatchError, match=r"rank 1 has stem\.weight: no state"):
        flatten_sharded_optim_state_dict(state, net, stepped)
    if dist.get_rank() == 0:
        state["state"][99] = {}
    expected = ValueError if dist.get_rank() == 0 else RankMismatchError
    with pytest.raises(expected, match=r"has id 99"):
        flatten_sharded_optim_state_dict(state, net, stepped)
    assert everyone("in step") == ["in step"] * dist.get_world_size()


@pytest.mark.cross
@pytest.mark.parametrize("kind", OptimStateKind)
@pytest.mark.parametrize("load_directly", [False, True])
@distributed(2, 4, matrix=[4])
def test_each_kind_trains_on(kind: OptimStateKind, load_directly: bool) -> None:
    options = OptimStateOptions(kind=kind, rank0_only=kind is OptimStateKind.FULL and load_directly)
    net, other = sharded(build()), sharded(build(7))
    for each in (net, other):
        set_optim_state_options(each, options)
    stepped, ours = adamw(net.parameters()), adamw(other.parameters())
    train(net, stepped, BEFORE)
    state = optim_state_dict(net, stepped)
    part = optim_state_dict_to_load(other, ours, state, load_directly=load_directly)
    if load_directly:
        part = ours.state_dict()
    assert_trains_on(weights_then_losses(other, ours, net.state_dict(), part))


def _save_parts(folder: str) -> None:
    net = sharded(build())
    stepped = adamw(net.parameters())
    train(net, stepped, BEFORE)
    state = {"model": net.state_dict(), "optim": sharded_optim_state_dict(net, stepped)}
    dcp.save(state, checkpoint_id=folder)


def _load_parts(folder: str) -> list[float]:
    net = every_layer(build(7))
    stepped = adamw(net.parameters())
    train(net, stepped, range(1))  # so that there is a state to read into
    state = {"model": net.state_dict(), "optim": sharded_optim_state_dict(net, stepped)}
    dcp.load(state, checkpoint_id=folder)
    part = flatten_sharded_optim_state_dict(state["optim"], net, stepped)
    return weights_then_losses(net, stepped, state["model"], part)


@pytest.mark.parametrize(
    ("before", "after"), few([(2, 4), (4, 2)], (2, 4), together=True), ids=["doubled", "halved"]
)
def test_a_sharded_state_is_saved_and_loaded_by_torchs_checkpoints(
    tmp_path: Path, before: int, after: int
) -> None:
    run_on_ranks(_save_parts, before, str(tmp_path / "parts"))
    for losses in run_on_ranks(_load_parts, after, str(tmp_path / "parts")):
        assert_trains_on(losses)


def _cut_by_torch(tensor: torch.Tensor, dim: int) -> ShardedTensor:
    """A ``ShardedTensor`` in chunks along ``dim``; the last ranks may hold nothing."""
    rank, chunks = dist.get_rank(), tensor.chunk(dist.get_world_size(), dim)
    start = [0, 0]
    start[dim] = rank * chunks[0].size(dim)
    held = [chunk.contiguous() for chunk in chunks[rank : rank + 1]]
    shards = [Shard.from_tensor_and_offsets(each, start, rank) for each in held]
    return init_from_local_shards(shards, *tensor.shape)


@pytest.mark.parametrize("target", WRAPPINGS)
@distributed(2, 4, matrix=[4])
def test_a_sharded_tensor_is_taken_where_it_is_cut_into_rows_and_refused_otherwise(
    target: str,
) -> None:
    _, state = saved()
    kept = state["state"]["stem.weight"]["exp_avg"]
    net = WRAPPINGS[target](build())
    state["state"]["stem.weight"] = {"exp_avg": _cut_by_torch(kept, 0)}
    found = shard_full_optim_state_dict(state, net)["state"][0]["exp_avg"]
    assert isinstance(found, DTensor) == (target != "unwrapped")
    assert torch.equal(full(found), kept)
    state["state"]["stem.weight"] = {"exp_avg": _cut_by_torch(kept, 1)}
    with pytest.raises(ValueError, match=r"exp_avg of stem\.weight is a ShardedTensor.*into rows"):
        shard_full_optim_state_dict(state, net)


# -- named optimizers, and those built early ------------------------------------------------------


@distributed(2, 4, matrix=[4])
def test_a_named_optimizer_is_saved_and_loaded_by_its_own_names() -> None:
    net, other = Wrapped(sharded(build())), Wrapped(every_layer(build(7)))
    stepped, ours = NamedAdamW(net), NamedAdamW(other)
    train(net, stepped, BEFORE)
    state = optim_state_dict(net, stepped)
    assert set(state["state"]) == {name for name, _ in build().named_parameters()}
    part = optim_state_dict_to_load(other, ours, state, is_named_optimizer=True)
    assert set(part["state"]) == {name for name, _ in other.named_parameters()}
    weights = net.state_dict()
    assert_trains_on(weights_then_losses(other, ours, weights, part))
    ids = adamw(other.parameters())  # an optimizer that goes by ids is asked for those
    part = optim_state_dict_to_load(other, ids, state, is_named_optimizer=True)
    assert_trains_on(weights_then_losses(other, ids, weights, part))


@distributed(2, 4, matrix=[4])
def test_an_optimizer_built_before_fully_shard_is_loaded() -> None:
    weights, state = saved()
    net = build(7)
    stepped = adamw(net.parameters())
    sharded(net)
    part = shard_full_optim_state_dict(state, net, optim=stepped)
    assert_trains_on(weights_then_losses(net, stepped, weights, part))
