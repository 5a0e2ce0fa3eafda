"""Steps of replica groups in one world: gradients, dropped steps, what joins, errors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.elastic import ElasticOptions, Lighthouse, ReplicaGroupError, ReplicaGroups
from fullshard.elastic.links import Links
from fullshard.insight import SlowRanks
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import ShardingPlacements, fully_shard
from fullshard.sharding.spi import local_shard
from fullshard.wire import WirePolicy
from support.elastic.in_world import InWorld, replica_groups
from support.elastic.model import Net, loss_of, make_model, make_optimizer
from support.ranks import distributed, run_on_ranks
from support.slow_ranks import Clock

# Out of the default run until many runs on a loaded machine have passed: a step that one rank drops
# alone parts these programs. test_links.py shows what once made one drop.
pytestmark = pytest.mark.matrix


def sharded(groups: ReplicaGroups, mesh: Any, *, seed: int, **options: Any) -> Net:
    model = make_model(seed)
    wire = groups.wire(options.pop("wire", None))
    for module in (model.inner, model.outer, model):
        fully_shard(module, mesh=mesh, wire_policy=wire, **options)
    return model


def carried(groups: ReplicaGroups, mesh: Any, *, seed: int, **options: Any) -> tuple[Any, Any]:
    """A model and its optimizer that the groups carry."""
    model = sharded(groups, mesh, seed=seed, **options)
    optimizer = make_optimizer(model)
    groups.carry(model, optimizer)
    return model, optimizer


def defined(sizes: list[int], first: int, *, average: bool) -> dict[str, torch.Tensor]:
    """The gradients of the unsharded model that the groups ``first`` and on contribute."""
    total: dict[str, torch.Tensor] = {}
    for place in range(first, len(sizes)):
        for rank in range(sizes[place]):
            model = make_model(seed=0)
            loss_of(model, place, rank, sizes[place]).backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                part = param.grad / sizes[place] / (len(sizes) - first if average else 1)
                total[name] = total.get(name, torch.zeros_like(part)) + part
    return total


def full(tensor: Any) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    assert isinstance(whole, torch.Tensor)
    return whole


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 2], [2, 1]])
@distributed(3)
def test_gradients_are_those_of_the_unsharded_model(sizes: list[int], average: bool) -> None:
    with replica_groups(sizes, average=average) as (groups, mesh, own):
        model, optimizer = carried(groups, mesh, seed=0)
        # The first step brings all groups to one state; the second one has all gradients.
        for expected in ((0,), tuple(range(len(sizes)))):
            step = groups.begin()
            assert len(step.contributors) == len(expected)
            loss_of(model, own, mesh.get_local_rank(), sizes[own]).backward()
            assert groups.commit()
            found = {name: full(param.grad) for name, param in model.named_parameters()}
            if len(expected) == len(sizes):
                for name, gradient in defined(sizes, 0, average=average).items():
                    torch.testing.assert_close(found[name], gradient)
            # Every group has the same bits, whatever its number of ranks.
            flat = torch.cat([each.reshape(-1) for each in found.values()])
            gathered = [torch.empty_like(flat) for _ in range(3)]
            dist.all_gather(gathered, flat)
            assert all(torch.equal(each, flat) for each in gathered)
            optimizer.zero_grad()


@pytest.mark.parametrize("form", ["inside", "between", "reduce dtype"])
@distributed(3)
def test_narrow_gradients_are_near_those_of_the_unsharded_model(form: str) -> None:
    sizes = [1, 2]
    between = torch.bfloat16 if form == "between" else None
    with replica_groups(sizes, between=between) as (groups, mesh, own):
        options: dict[str, Any] = {}
        if form == "inside":
            options["wire"] = WirePolicy(reductions=torch.bfloat16)
        if form == "reduce dtype":
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        model, optimizer = carried(groups, mesh, seed=0, **options)
        for _ in range(2):
            groups.begin()
            optimizer.zero_grad()
            loss_of(model, own, mesh.get_local_rank(), sizes[own]).backward()
            assert groups.commit()
        for name, gradient in defined(sizes, 0, average=True).items():
            found = full(dict(model.named_parameters())[name].grad)
            assert not torch.equal(found, gradient)
            torch.testing.assert_close(found, gradient, rtol=2**-6, atol=2**-8)


@distributed(2)
def test_the_first_sum_is_under_way_before_the_last_backward_begins() -> None:
    with replica_groups([1, 1]) as (groups, mesh, _):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (model[0], model[1], model):
            fully_shard(module, mesh=mesh, wire_policy=groups.wire())
        optimizer = make_optimizer(model)
        groups.carry(model, optimizer)
        events: list[str] = []
        exchange = groups.wire().exchange
        submit = exchange.submit

        def noted(flight: Any) -> Any:
            events.append(f"sum of {flight.plan.config.name}")
            return submit(flight)

        exchange.submit = noted  # type: ignore[method-assign]  # of this object alone
        model[0].register_full_backward_pre_hook(lambda *_: events.append("backward of 0"))
        groups.begin()
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()
        assert groups.commit()
        assert events == ["sum of 1", "backward of 0", "sum of 0"]


@distributed(3)
def test_a_backward_that_raises_drops_the_step_on_all_groups() -> None:
    sizes = [1, 2]
    with replica_groups(sizes, timeout=3.0) as (groups, mesh, own):
        model, optimizer = carried(groups, mesh, seed=own)
        before = [full(each).clone() for each in model.parameters()]
        groups.begin()
        if own == 1:
            model.norm.register_forward_hook(_fails_in_backward)
        loss = loss_of(model, own, mesh.get_local_rank(), sizes[own])
        with pytest.raises(RuntimeError, match="of the user's") if own == 1 else nullcontext():
            loss.backward()
        assert not groups.commit()
        optimizer.zero_grad()
        for old, new in zip(before, model.parameters(), strict=True):
            assert torch.equal(old, full(new))
        assert groups.steps == 0


@distributed(4)
def test_a_rank_that_cannot_connect_drops_the_step_on_all_groups_at_once() -> None:
    failures = ["of a test"] if dist.get_rank() == 1 else []

    def connect(*args: Any) -> Links:
        links = Links(*args)
        if failures:
            links.close()
            raise ConnectionError(failures.pop())
        return links

    # A wait for the other ranks of a group that dropped the step would outlast the test.
    with (
        patch("fullshard.elastic.groups.Links", connect),
        replica_groups([2, 2], timeout=300.0) as (groups, mesh, own),
    ):
        model, _ = carried(groups, mesh, seed=0)
        groups.load_state_dict({"steps": 0, "batches": 0, "lineage": "of both"})
        committed: list[bool] = []
        while not any(committed):
            step = groups.begin()
            loss_of(model, own, mesh.get_local_rank(), 2).backward()
            committed.append(groups.commit())
            if not committed[-1]:
                model.zero_grad()
        assert len(step.contributors) == 2
        assert committed == ([True] if own == 0 else [False, True])
        for name, gradient in defined([2, 2], 0, average=True).items():
            torch.testing.assert_close(full(dict(model.named_parameters())[name].grad), gradient)


def _fails_in_backward(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("a hook of the user's")

    output.register_hook(fail)


@distributed(3)
def test_an_export_in_the_middle_of_a_step_changes_no_bit_of_it() -> None:
    plain, exported = (_trained(exports=exports) for exports in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, exported, strict=True))


def _trained(*, exports: bool) -> list[torch.Tensor]:
    """The parameters after two steps, in whose forwards and backwards the state is exported."""
    calls: list[Any] = []
    with replica_groups([3]) as (groups, mesh, own):
        model, optimizer = carried(groups, mesh, seed=0)
        state = groups._state
        assert state is not None

        def export(*_: Any) -> None:
            calls.append(state.export()[1])

        def export_twice(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            export()
            output.register_hook(export)

        if exports:
            model.norm.register_forward_hook(export_twice)
        params = list(model.parameters())
        for _ in range(2):
            groups.begin()
            loss_of(model, own, mesh.get_local_rank(), 3).backward()
            assert groups.commit()
            optimizer.step()
            optimizer.zero_grad()
        # In a forward and in a backward they are the same shards, those of the parameters.
        for forward, backward in zip(calls[::2], calls[1::2], strict=True):
            for param, (one, _), (other, _) in zip(params, forward, backward, strict=False):
                assert torch.equal(one, other)
                assert isinstance(param, DTensor) and one.shape == local_shard(param).shape
        assert len(calls) == (4 if exports else 0)
        return [full(param) for param in params]


@distributed(3)
def test_a_group_of_other_size_receives_all_state_of_the_run() -> None:
    sizes = [1, 2]
    with replica_groups(sizes) as (groups, mesh, own):
        model = sharded(groups, mesh, seed=own)
        optimizer = make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        groups.carry(model, optimizer, scheduler=scheduler)
        if own == 0:  # the run has trained before
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            groups.load_state_dict({"steps": 7, "batches": 11, "lineage": "before"})
        torch.manual_seed(own)
        step = groups.begin()
        assert (step.number, step.batch) == (7, 11)
        assert (step.contributors, step.joining) == (("a",), ("b",))
        assert (step.index is None) == (own == 1)
        loss_of(model, own, mesh.get_local_rank(), sizes[own]).backward()
        assert groups.commit()
        assert scheduler.last_epoch == 1 and optimizer.param_groups[0]["lr"] == 0.01
        found = [full(each) for each in model.parameters()]
        for param in model.parameters():
            state = optimizer.state[param]
            found += [full(state["exp_avg"]), full(state["exp_avg_sq"]), state["step"]]
        found += [*model.buffers(), torch.get_rng_state().float()]
        flat = torch.cat([each.detach().reshape(-1).float() for each in found])
        gathered = [torch.empty_like(flat) for _ in range(3)]
        dist.all_gather(gathered, flat)
        assert all(torch.equal(each, flat) for each in gathered)


@distributed(3)
def test_numbers_of_all_groups_are_added_and_the_first_ones_decide() -> None:
    sizes = [2, 1]
    with replica_groups(sizes) as (groups, mesh, own):
        model, _ = carried(groups, mesh, seed=0)
        for contributors in (1, 2):
            groups.begin()
            loss_of(model, own, mesh.get_local_rank(), sizes[own]).backward()
            assert groups.from_first(torch.tensor(5.0 + own)).item() == 5.0
            total = groups.sum(torch.tensor([1.0, 10.0 * (own + 1)]))
            assert total.tolist() == ([1.0, 10.0] if contributors == 1 else [2.0, 30.0])
            assert groups.commit()


# -- errors ---------------------------------------------------------------------------------------


@distributed(2)
def test_waits_for_other_ranks_and_groups_are_not_own_time() -> None:
    clock, quorum, agree = Clock(), InWorld.quorum, InWorld.agree

    def late(call: Any) -> Any:
        def waits(*args: Any) -> Any:
            clock.pass_ms(50)
            return call(*args)

        return waits

    with replica_groups([2]) as (groups, mesh, _):
        model, optimizer = carried(groups, mesh, seed=0)
        with (
            patch.object(InWorld, "quorum", late(quorum)),
            patch.object(InWorld, "agree", late(agree)),
            SlowRanks(clock=clock) as watch,
        ):
            for _ in range(3):
                step = groups.begin()
                loss_of(model, step.batch, dist.get_rank(), 2).backward()
                clock.pass_ms(7)
                groups.sum(torch.ones(1))
                assert groups.commit()
                optimizer.step()
        steps = watch.own_times().steps
    # a quorum for each step, a vote for each, and a vote on the connections
    assert sum(step.waits["replica groups"] for step in steps) == pytest.approx(7 * 0.05)
    assert [sum(step.own.values()) for step in steps] == pytest.approx([0.007] * 3)


@distributed(2)
def test_steps_out_of_order_are_errors_that_say_what_to_call() -> None:
    with replica_groups([1, 1]) as (groups, mesh, own):
        model = sharded(groups, mesh, seed=0)
        optimizer = make_optimizer(model)
        with pytest.raises(ReplicaGroupError, match="call that first"):
            groups.begin()
        groups.carry(model, optimizer)
        for call in (groups.commit, lambda: groups.from_first(torch.ones(1))):
            with pytest.raises(ReplicaGroupError, match=r"call begin\(\) first"):
                call()
        with pytest.raises(ReplicaGroupError, match=r"call begin\(\) before the forward"):
            loss_of(model, own, 0, 1).backward()
        optimizer.zero_grad()
        groups.begin()
        with pytest.raises(ReplicaGroupError, match=r"call commit\(\) after each backward"):
            groups.begin()


@distributed(2)
def test_a_module_with_another_wire_policy_is_named() -> None:
    with replica_groups([1, 1]) as (groups, mesh, _):
        model = make_model(seed=0)
        with pytest.raises(ValueError, match="without sharded modules"):
            groups.carry(model, make_optimizer(model))
        fully_shard(model.inner, mesh=mesh)
        fully_shard(model, mesh=mesh, wire_policy=groups.wire())
        with pytest.raises(ValueError, match=r"wire_policy=groups\.wire\(\)"):
            groups.carry(model, make_optimizer(model))


@pytest.mark.parametrize("differs", ["shapes", "sharded modules", "trainable"])
@distributed(2)
def test_a_group_with_another_model_is_named(differs: str) -> None:
    with replica_groups([1, 1]) as (groups, mesh, own):
        model = nn.Sequential(nn.Linear(4, 4 + (own if differs == "shapes" else 0)))
        if own == 0 or differs != "sharded modules":
            fully_shard(model[0], mesh=mesh, wire_policy=groups.wire())
        fully_shard(model, mesh=mesh, wire_policy=groups.wire())
        if differs == "trainable":
            model[0].weight.requires_grad_(own == 0)
        groups.carry(model, make_optimizer(model))
        with pytest.raises(ReplicaGroupError, match="b and a") if own == 1 else nullcontext():
            assert groups.begin().contributors == ("a",)


def _on_two_axes(own: int, sizes: list[int], placements: Any) -> Any:
    first = sum(sizes[:own])
    places = torch.arange(first, first + sizes[own]).view(2, -1)
    names = (f"outer{own}", f"inner{own}")
    if placements is not None:
        placements = ShardingPlacements(**dict.fromkeys(placements, names[1]))
    return DeviceMesh("cpu", places, mesh_dim_names=names), placements


@distributed(4)
def test_a_group_with_another_mesh_is_named_before_any_reduction() -> None:
    with replica_groups([2, 2]) as (groups, mesh, own):
        made = [_on_two_axes(place, [2, 2], None)[0] for place in (0, 1)]  # by all ranks
        carried(groups, made[0] if own == 0 else mesh, seed=0)
        told = r"b of 2 ranks over all of them and a of 2 ranks over ranks \[0, 1\] as \(2, 1\)"
        with pytest.raises(ReplicaGroupError, match=told) if own == 1 else nullcontext():
            assert groups.begin().contributors == ("a",)


@pytest.mark.matrix
@pytest.mark.parametrize("placements", [None, ("compute", "gradients"), ("compute",)])
@distributed(8)
def test_groups_with_equal_meshes_of_two_axes_add_what_the_unsharded_model_has(
    placements: Any,
) -> None:
    sizes = [4, 4]
    with replica_groups(sizes) as (groups, _, own):
        meshes = [_on_two_axes(place, sizes, placements) for place in (0, 1)]
        mesh, placed = meshes[own]
        options = {} if placed is None else {"placements": placed}
        model, optimizer = carried(groups, mesh, seed=0, **options)
        rank = dist.get_rank() % 4
        for contributors in (1, 2):
            step = groups.begin()
            assert len(step.contributors) == contributors
            optimizer.zero_grad()
            for is_last in (False, True):
                model.set_is_last_backward(is_last)
                (loss_of(model, own, rank, 4) / 2).backward()
            assert groups.commit()
        for name, gradient in defined(sizes, 0, average=True).items():
            torch.testing.assert_close(full(dict(model.named_parameters())[name].grad), gradient)


def _reduces_fewer(sizes: list[int]) -> str:
    with replica_groups(sizes, timeout=3.0) as (groups, mesh, own):
        model, _ = carried(groups, mesh, seed=0)
        groups.begin()
        loss = loss_of(model, own, 0, 1)
        try:
            if own == 0:
                loss.backward()
            return str(groups.commit())
        except ReplicaGroupError as error:
            return str(error)


def test_groups_that_reduce_other_gradients_commit_nothing() -> None:
    found = run_on_ranks(_reduces_fewer, 2, [1, 1])
    assert found == ["False", "False"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"lighthouse": "head"}, "http://head:29510"),
        ({"group": "a:b"}, "a name without"),
        ({"group": ""}, "a name without"),
        ({"timeout": 0.0}, "positive number of seconds"),
        ({"quorum_timeout": float("inf")}, "positive number of seconds"),
        ({"min_groups": 0}, "1 or more"),
        ({"max_dropped": 0}, "1 or more"),
        ({"between": torch.float16}, "torch.bfloat16"),
    ],
)
def test_wrong_options_say_what_is_allowed(wrong: dict[str, Any], told: str) -> None:
    right = {"lighthouse": "http://head:29510", "group": "a"}
    with pytest.raises(ValueError, match=told):
        ElasticOptions(**{**right, **wrong})


def test_without_torchft_the_error_says_what_to_install() -> None:
    with (
        patch.dict("sys.modules", {"torchft.coordination": None}),
        pytest.raises(ModuleNotFoundError, match=r"fullshard-elastic\[torchft\]"),
    ):
        Lighthouse()
