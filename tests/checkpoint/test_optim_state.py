"""Saving an optimizer's state: the unsharded model's, by names, from any sharding of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor, Partial

from fullshard.checkpoint import (
    OptimStateKeyType,
    OptimStateKind,
    OptimStateOptions,
    full_optim_state_dict,
    optim_state_dict,
    optim_state_options,
    rekey_optim_state_dict,
    scatter_full_optim_state_dict,
    set_optim_state_options,
    shard_full_optim_state_dict,
    sharded_optim_state_dict,
)
from fullshard.checkpoint.parts import as_cut
from fullshard.sharding import RankMismatchError, fully_shard
from support.gather_hooks import Wrapped as OwnTensor
from support.parity.compare import full
from support.ranks import distributed
from support.surface.model import Net, batch, build, sharded, train
from support.surface.ranks import everyone
from support.surface.wrappings import WRAPPINGS, Wrapped, adamw, hybrid, tied, two_groups

Optim = Callable[[Any], torch.optim.Optimizer]
CPU = torch.device("cpu")


class _Own(torch.optim.Adam):
    """Steps on ``DTensor``: fullshard does not know what a class of one's own does."""


OPTIMIZERS: dict[str, Optim] = {
    "AdamW": adamw,
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SGD, which has no state": lambda params: torch.optim.SGD(params, lr=0.1),
    "AMSGrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "a class of one's own": lambda params: _Own(params, lr=0.1),
}


def by_name(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer of an unsharded model has: the definition."""
    names = [name for name, _ in model.named_parameters()]
    held = {param: name for name, param in model.named_parameters()}
    order = [held[param] for group in optim.param_groups for param in group["params"]]
    found = optim.state_dict()
    assert set(order) <= set(names)
    groups = [{**g, "params": [order[at] for at in g["params"]]} for g in found["param_groups"]]
    return {"state": {order[at]: v for at, v in found["state"].items()}, "param_groups": groups}


def assert_same(ours: dict[str, Any], definition: dict[str, Any]) -> None:
    """The same parameters, the same kinds of state, close tensors, the same options."""
    assert ours["state"].keys() == definition["state"].keys()
    for name, state in definition["state"].items():
        assert ours["state"][name].keys() == state.keys(), name
        for key, value in state.items():
            found = ours["state"][name][key]
            if isinstance(value, torch.Tensor):
                assert not isinstance(found, DTensor), (name, key)
                torch.testing.assert_close(found, value, msg=f"{name}, {key}: {found}, not {value}")
            else:
                assert found == value, (name, key)
    assert [sorted(group["params"]) for group in ours["param_groups"]] == [
        sorted(group["params"]) for group in definition["param_groups"]
    ]
    for mine, theirs in zip(ours["param_groups"], definition["param_groups"], strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }


def definition(optim: Optim = adamw, steps: int = 2) -> dict[str, Any]:
    plain = build()
    return by_name(plain, trained(plain, optim, steps))


def trained(net: Any, optim: Optim = adamw, steps: int = 2) -> torch.optim.Optimizer:
    stepped = optim(net.parameters())
    train(net, stepped, range(steps))
    return stepped


# -- full -----------------------------------------------------------------------------------------


@pytest.mark.cross
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(2, 4, matrix=[4])
def test_a_full_state_is_the_unsharded_optimizers_on_rank_0_and_empty_elsewhere(name: str) -> None:
    net = sharded(build())
    state = full_optim_state_dict(net, trained(net, OPTIMIZERS[name]))
    if dist.get_rank() == 0:
        assert_same(state, definition(OPTIMIZERS[name]))
    else:
        assert state == {}


@distributed(2, 4, matrix=[4])
def test_it_is_what_fsdp1_of_torch_gives() -> None:
    theirs: Any = build()
    for index, block in enumerate(theirs.blocks):
        theirs.blocks[index] = TorchFSDP(block, use_orig_params=True, device_id=CPU)
    theirs = TorchFSDP(theirs, use_orig_params=True, device_id=CPU)
    # torch's, on the CPU, overwrites one kind of state by the next, so there must be one
    momentum = OPTIMIZERS["SGD with momentum"]
    torchs = TorchFSDP.optim_state_dict(theirs, trained(theirs, momentum))
    net = sharded(build())
    assert_same(full_optim_state_dict(net, trained(net, momentum), rank0_only=False), torchs)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@distributed(2, 4, matrix=[4])
def test_it_does_not_depend_on_how_the_model_is_wrapped(wrapping: str) -> None:
    net = WRAPPINGS[wrapping](build())
    stepped = trained(net)
    assert_same(full_optim_state_dict(net, stepped, rank0_only=False), definition())
    state = full_optim_state_dict(net, stepped)
    assert bool(state) == (dist.get_rank() == 0)


@distributed(2, 4)
def test_a_hybrid_model_has_it_too() -> None:
    net = hybrid(build())
    stepped = trained(net)
    assert_same(full_optim_state_dict(net, stepped, rank0_only=False), definition())
    state = full_optim_state_dict(net, stepped)
    assert bool(state) == (dist.get_rank() == 0)
    if state:
        assert_same(state, definition())


@distributed(2, 4)
def test_rank_0_of_a_group_may_be_another_rank() -> None:
    world = dist.get_world_size()
    half = world // 2
    first, last = dist.new_group(range(half)), dist.new_group(range(half, world))
    if dist.get_rank() >= half:
        mesh = torch.distributed.device_mesh.DeviceMesh.from_group(
            last, "cpu", mesh_dim_names=("last",)
        )
        net = sharded(build(), mesh=mesh)
        stepped = trained(net)
        for group in (None, last):
            state = full_optim_state_dict(net, stepped, group=group)
            assert bool(state) == (dist.get_rank() == half)
        state = full_optim_state_dict(net, stepped, rank0_only=False, group=last)
        assert_same(state, definition())
    dist.barrier()  # no rank closes what another is still connecting
    dist.destroy_process_group(last if dist.get_rank() >= half else first)


# -- what travels ---------------------------------------------------------------------------------


@distributed(2, 4, matrix=[4])
def test_rank0_only_sends_parts_to_rank_0_and_whole_tensors_to_nobody() -> None:
    net = sharded(build())
    stepped = trained(net)
    sent: list[int] = []
    real = dist.gather

    def gather(tensor: torch.Tensor, received: Any = None, **kwargs: Any) -> Any:
        assert (received is None) == (dist.get_rank() != 0)
        sent.append(tensor.nbytes)
        return real(tensor, received, **kwargs)

    gathered: list[int] = []
    real_all = dist.all_gather

    def all_gather(received: list[torch.Tensor], tensor: torch.Tensor, **kwargs: Any) -> Any:
        gathered.append(tensor.nbytes)
        return real_all(received, tensor, **kwargs)

    with patch.object(dist, "gather", gather), patch.object(dist, "all_gather", all_gather):
        full_optim_state_dict(net, stepped)
    assert not gathered
    parts = [-(-p.shape[0] // dist.get_world_size()) * p[0].nbytes for p in net.parameters()]
    assert sorted(sent) == sorted(2 * parts)


@distributed(2, 4, matrix=[4])
def test_no_state_yet_is_an_empty_state() -> None:
    net = sharded(build())
    state = full_optim_state_dict(net, adamw(net.parameters()), rank0_only=False)
    assert state["state"] == {}
    assert state["param_groups"][0]["params"] == [name for name, _ in build().named_parameters()]


# -- parameters -----------------------------------------------------------------------------------


@distributed(2, 4, matrix=[4])
def test_parameters_in_several_groups_keep_theirs() -> None:
    plain, net = build(), sharded(build())
    ours = trained(net, lambda _: adamw(two_groups(net)))
    expected = by_name(plain, trained(plain, lambda _: adamw(two_groups(plain))))
    assert_same(full_optim_state_dict(net, ours, rank0_only=False), expected)
    given = full_optim_state_dict(net, ours, two_groups(net), rank0_only=False)
    assert_same(given, expected)


@distributed(2, 4, matrix=[4])
def test_parameters_that_are_not_managed_are_saved_as_they_are() -> None:
    net = build()
    net = sharded(net, ignored_params={net.head.weight, net.blocks[0].scale})
    assert_same(full_optim_state_dict(net, trained(net), rank0_only=False), definition())


@distributed(2, 4, matrix=[4])
def test_frozen_and_unused_parameters_have_no_state() -> None:
    def prepared() -> Net:
        net = build()
        net.stem.weight.requires_grad_(False)
        net.head.register_parameter("spare", nn.Parameter(torch.ones(3)))
        return net

    plain, net = prepared(), sharded(prepared())
    state = full_optim_state_dict(net, trained(net), rank0_only=False)
    assert_same(state, by_name(plain, trained(plain)))
    assert "stem.weight" not in state["state"] and "head.spare" not in state["state"]
    assert {"stem.weight", "head.spare"} <= set(state["param_groups"][0]["params"])


@distributed(2, 4)
def test_tied_parameters_go_by_their_first_name_and_those_without_a_dim_are_whole() -> None:
    torch.manual_seed(0)
    plain = tied()
    torch.manual_seed(0)
    net = tied()
    fully_shard(net.one)
    fully_shard(net)
    state = full_optim_state_dict(net, trained(net), rank0_only=False)
    assert_same(state, by_name(plain, trained(plain)))
    assert "one.weight" in state["state"] and "two.weight" not in state["state"]
    assert state["state"]["factor"]["exp_avg"].shape == ()


@distributed(2, 4, matrix=[4])
def test_an_optimizer_built_before_fully_shard_is_saved_by_the_same_names() -> None:
    net = build()
    stepped = adamw(net.parameters())
    sharded(net)
    assert full_optim_state_dict(net, stepped, rank0_only=False)["state"] == {}
    train(net, stepped, range(2))
    assert_same(full_optim_state_dict(net, stepped, rank0_only=False), definition())


@distributed(2, 4, matrix=[4])
def test_parameters_that_are_unsharded_now_are_found() -> None:
    net: Any = sharded(build(), reshard_after_forward=False)
    stepped = trained(net)
    net.blocks[0].unshard()
    with torch.no_grad():
        net(batch())
    assert_same(full_optim_state_dict(net, stepped, rank0_only=False), definition())


# -- kinds of state -------------------------------------------------------------------------------


class _Odd(torch.optim.Optimizer):
    """Keeps plain parts, none where this rank has no row, and what is no tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                plain = isinstance(param, DTensor)
                local, grad = (
                    (param.to_local(), param.grad.to_local()) if plain else (param, param.grad)
                )
                if local.numel() == 0:
                    continue
                state = self.state[param]
                state.setdefault("sum", torch.zeros_like(local)).add_(grad)
                state["none"], state["name"], state["list"] = None, "odd", [1, torch.ones(())]
                state["step"] = state.get("step", torch.zeros(())) + 1
                local.add_(state["sum"], alpha=-group["lr"])


@distributed(2, 4, matrix=[4])
def test_plain_parts_none_and_what_is_no_tensor_are_saved() -> None:
    net = sharded(build())
    stepped = trained(net, _Odd)
    state = full_optim_state_dict(net, stepped, rank0_only=False)
    assert_same(state, definition(_Odd))
    assert state["state"]["blocks.0.scale"]["list"] == [1, torch.ones(())]


@distributed(2, 4, matrix=[4])
def test_state_that_belongs_to_no_parameter_is_kept() -> None:
    net = sharded(build())
    stepped: Any = trained(net)
    stepped.state["my counter"] = {"value": torch.tensor(3)}
    state = full_optim_state_dict(net, stepped, rank0_only=False)
    assert state["state"]["my counter"] == {"value": torch.tensor(3)}


@distributed(2, 4, matrix=[4])
def test_a_sum_that_is_not_added_up_yet_is_saved_as_the_sum() -> None:
    net: Any = sharded(build())
    stepped = trained(net)
    mesh = net.head.weight.device_mesh
    own = torch.full((3,), dist.get_rank() + 1.0)
    stepped.state[net.head.weight]["seen"] = DTensor.from_local(own, mesh, [Partial()])
    for rank0_only in (True, False):
        state = full_optim_state_dict(net, stepped, rank0_only=rank0_only)
        assert bool(state) == (not rank0_only or dist.get_rank() == 0)
        if state:
            total = float(sum(range(dist.get_world_size() + 1)))
            assert state["state"]["head.weight"]["seen"].tolist() == [total] * 3


@distributed(2, 4, matrix=[4])
def test_a_tensor_of_a_class_of_its_own_keeps_it_and_is_not_scattered_by_its_bytes() -> None:
    net: Any = sharded(build())
    stepped = trained(net)
    param = net.head.weight
    before = stepped.state[param]["exp_avg"].to_local().clone()
    stepped.state[param]["exp_avg"] = as_cut(param, OwnTensor(before))
    first = full_optim_state_dict(net, stepped)
    state = full_optim_state_dict(net, stepped, rank0_only=False)
    assert bool(first) == (dist.get_rank() == 0)
    for found in (state, first) if first else (state,):
        assert type(found["state"]["head.weight"]["exp_avg"]) is OwnTensor
    part = shard_full_optim_state_dict(state, net, optim=stepped)
    key = [name for name, _ in net.named_parameters()].index("head.weight")
    loaded = part["state"][key]["exp_avg"].to_local()
    assert type(loaded) is OwnTensor and torch.equal(loaded._data, before)
    expected = ValueError if dist.get_rank() == 0 else RankMismatchError
    with pytest.raises(expected, match=r"head\.weight holds a Wrapped, exp_avg; scatter"):
        scatter_full_optim_state_dict(first, net, optim=stepped)


@distributed(2, 4, matrix=[4])
def test_classes_that_differ_between_ranks_raise_on_every_rank() -> None:
    net: Any = sharded(build())
    stepped = trained(net)
    if dist.get_rank() == 1:
        local = stepped.state[net.head.weight]["exp_avg"].to_local()
        stepped.state[net.head.weight]["exp_avg"] = as_cut(net.head.weight, OwnTensor(local))
    with pytest.raises(RankMismatchError, match=r"rank 1 has head\.weight: .*exp_avg Wrapped"):
        full_optim_state_dict(net, stepped)


class _Uncut(OwnTensor):
    """A class that cannot be cut, as where a block of codes shares a scale."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the function
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        if str(func) == "aten.slice.Tensor":
            raise NotImplementedError("no part of a block")
        return super().__torch_dispatch__(func, types, args, kwargs)


@distributed(2, 4, matrix=[4])
def test_a_class_that_cannot_be_cut_is_an_error_that_names_the_state() -> None:
    net: Any = sharded(build())
    stepped = trained(net)
    state = full_optim_state_dict(net, stepped, rank0_only=False)
    state["state"]["stem.weight"]["exp_avg"] = _Uncut(state["state"]["stem.weight"]["exp_avg"])
    with pytest.raises(NotImplementedError) as caught:
        shard_full_optim_state_dict(state, net, optim=stepped)
    assert caught.value.__notes__ == ["while cutting exp_avg of stem.weight, a _Uncut"]


# -- sharded, local, and the options --------------------------------------------------------------


@distributed(2, 4, matrix=[4])
def test_a_sharded_state_is_cut_as_the_parameters_and_sends_nothing() -> None:
    net = sharded(build())
    stepped = trained(net)
    if dist.get_rank() == 0:  # alone: it would wait for ever if anything were exchanged
        state = sharded_optim_state_dict(net, stepped)
    dist.barrier()
    if dist.get_rank() != 0:
        state = sharded_optim_state_dict(net, stepped)
    expected = definition()
    for name, param in net.named_parameters():
        found = state["state"][name]["exp_avg"]
        assert isinstance(found, DTensor) and isinstance(param, DTensor)
        assert found.placements == param.placements
        torch.testing.assert_close(full(found), expected["state"][name]["exp_avg"])
        assert not isinstance(state["state"][name]["step"], DTensor)


@distributed(2, 4, matrix=[4])
def test_the_options_of_a_model_say_what_kind_is_given() -> None:
    net: Any = sharded(build())
    stepped = trained(net)
    assert optim_state_options(net) == OptimStateOptions()
    assert_same(optim_state_dict(net, stepped), definition())

    def kept(options: OptimStateOptions) -> Any:
        set_optim_state_options(net, options)
        return optim_state_dict(net, stepped)

    one = kept(OptimStateOptions(rank0_only=True))
    assert bool(one) == (dist.get_rank() == 0)
    cut = kept(OptimStateOptions(kind=OptimStateKind.SHARDED))["state"]["stem.weight"]["exp_avg"]
    assert isinstance(cut, DTensor)
    part = kept(OptimStateOptions(kind=OptimStateKind.LOCAL))["state"]["stem.weight"]["exp_avg"]
    assert torch.equal(part, cut.to_local()) and not isinstance(part, DTensor)
    assert optim_state_options(net.blocks[0]).kind is OptimStateKind.LOCAL
    previous = set_optim_state_options(net, OptimStateOptions())
    assert previous.kind is OptimStateKind.LOCAL


@distributed(2, 4, matrix=[4])
def test_a_state_dict_that_is_handed_in_is_translated() -> None:
    net = sharded(build())
    stepped = trained(net)
    found = stepped.state_dict()
    train(net, stepped, range(1))
    found["param_groups"][0]["lr"] = 7.0
    assert optim_state_dict(net, stepped, found)["param_groups"][0]["lr"] == 7.0


def test_options_that_contradict_each_other_are_errors() -> None:
    with pytest.raises(ValueError, match=r"rank0_only=True.*SHARDED"):
        OptimStateOptions(kind=OptimStateKind.SHARDED, rank0_only=True)
    kind: Any = "full"
    with pytest.raises(TypeError, match=r"kind is 'full'; pass a fullshard\.checkpoint\."):
        OptimStateOptions(kind=kind)
    options: Any = "full"
    with pytest.raises(TypeError, match=r"options is a str"):
        set_optim_state_options(nn.Linear(1, 1), options)


def test_modules_below_that_were_told_different_options_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    set_optim_state_options(model[0], OptimStateOptions(rank0_only=True))
    assert optim_state_options(model).rank0_only
    set_optim_state_options(model[1], OptimStateOptions())
    with pytest.raises(ValueError, match=r"told different options"):
        optim_state_options(model)


# -- names and ids --------------------------------------------------------------------------------


@distributed(2, 4, matrix=[4])
def test_what_wrappers_put_into_names_is_left_out() -> None:
    net: Any = build()
    for index, block in enumerate(net.blocks):
        net.blocks[index] = Wrapped(fully_shard(block))
    net = Wrapped(fully_shard(net))
    assert_same(full_optim_state_dict(net, trained(net), rank0_only=False), definition())


def test_ids_become_names_and_names_ids() -> None:
    plain = build()
    stepped = adamw(two_groups(plain))
    train(plain, stepped, range(2))
    ids = stepped.state_dict()
    named = rekey_optim_state_dict(ids, OptimStateKeyType.PARAM_NAME, plain, optim=stepped)
    assert_same(named, by_name(plain, stepped))
    again = rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, plain, optim=stepped)
    assert again["param_groups"] == ids["param_groups"]
    assert again["state"].keys() == ids["state"].keys()
    by_input = rekey_optim_state_dict(
        ids, OptimStateKeyType.PARAM_NAME, plain, optim_input=two_groups(plain)
    )
    assert_same(by_input, named)
    kind: Any = "names"
    with pytest.raises(TypeError, match=r"optim_state_key_type is 'names'"):
        rekey_optim_state_dict(ids, kind, plain)


def test_without_an_optimizer_ids_are_positions_among_the_models_parameters() -> None:
    plain = build()
    stepped = trained(plain)
    named = rekey_optim_state_dict(stepped.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
    assert_same(named, by_name(plain, stepped))


# -- errors ---------------------------------------------------------------------------------------


@distributed(2, 4, matrix=[4])
def test_a_parameter_that_the_model_lacks_is_an_error_on_every_rank() -> None:
    net = sharded(build())
    stepped = adamw([*net.parameters(), nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(ValueError, match=r"group 0 of the optimizer.*shape \(2, 3\)"):
        full_optim_state_dict(net, stepped)
    assert everyone("in step") == ["in step"] * dist.get_world_size()


@distributed(2, 4, matrix=[4])
def test_an_error_of_one_rank_is_told_to_the_others() -> None:
    net = sharded(build())
    stepped = trained(net)
    if dist.get_rank() == 1:
        stepped.param_groups[0]["params"].append(nn.Parameter(torch.ones(2, 3)))
    expected = ValueError if dist.get_rank() == 1 else RankMismatchError
    with pytest.raises(expected, match=r"shape \(2, 3\)"):
        full_optim_state_dict(net, stepped)
    assert everyone("in step") == ["in step"] * dist.get_world_size()


@distributed(2, 4, matrix=[4])
def test_ranks_with_other_state_raise_on_every_rank_naming_the_parameter() -> None:
    net = sharded(build())
    stepped = trained(net)
    if dist.get_rank() == 1:
        del stepped.state[net.head.weight]["exp_avg"]
    with pytest.raises(RankMismatchError, match=r"rank 1 has head\.weight: exp_avg_sq"):
        full_optim_state_dict(net, stepped)
    if dist.get_rank() == 1:
        del stepped.state[net.head.weight]
    with pytest.raises(RankMismatchError, match=r"rank 1 has head\.weight: no state"):
        full_optim_state_dict(net, stepped)
    assert len(set(everyone("in step"))) == 1
