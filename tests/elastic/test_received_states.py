"""A group counts as up to date when a received state is loaded, and not before."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.elastic import Quorum, ReplicaGroupError, ReplicaGroups, recovery, state
from fullshard.elastic.membership import Member, Roster
from fullshard.elastic.recovery import Recovery
from fullshard.sharding import fully_shard
from fullshard.sharding.spi import local_shard
from support.elastic.in_world import replica_groups
from support.elastic.model import loss_of, make_model, make_optimizer
from support.ranks import distributed

RUN = {"steps": 7, "batches": 11, "lineage": "of the run"}


def carried(groups: ReplicaGroups, mesh: Any, own: int) -> tuple[nn.Module, Any]:
    """The model and optimizer of a group; group 0 is the run, at step 7."""
    model = make_model(seed=own)
    for module in (model.inner, model.outer, model):
        fully_shard(module, mesh=mesh, wire_policy=groups.wire())
    optimizer = make_optimizer(model)
    groups.carry(model, optimizer)
    if own == 0:
        groups.load_state_dict(RUN)
    return model, optimizer


def stepped(groups: ReplicaGroups, model: nn.Module, optimizer: Any, own: int) -> bool:
    loss_of(model, own, 0, 1).backward()
    committed = groups.commit()
    if committed:
        optimizer.step()
    optimizer.zero_grad()
    return committed


def equal_on_all_ranks(model: nn.Module) -> bool:
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    flat = torch.cat([each.detach().reshape(-1) for each in parts])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    return all(torch.equal(each, flat) for each in gathered)


def lost_once() -> Any:
    """A transfer whose source is lost, once."""
    receive, losses = recovery._receive_parts, [ConnectionError("the source was lost")]

    def receives(*args: Any) -> Any:
        if losses:
            raise losses.pop()
        return receive(*args)

    return patch.object(recovery, "_receive_parts", receives)


def changed_once() -> Any:
    """A transfer in which a byte changes, once."""
    send, changes = recovery._Link.move, [1]

    def moves(link: Any, tensors: list[torch.Tensor], at: int, *, sends: bool) -> Any:
        if sends and changes:
            changes.pop()
            tensors = [each.clone() for each in tensors]
            tensors[-1].view(-1).view(torch.uint8)[0] ^= 1
        return send(link, tensors, at, sends=sends)

    return patch.object(recovery._Link, "move", moves)


@pytest.mark.parametrize("fault", [lost_once, changed_once])
@distributed(2)
def test_a_group_whose_join_failed_receives_the_state_again(fault: Any) -> None:
    with replica_groups([1, 1]) as (groups, mesh, own):
        model, optimizer = carried(groups, mesh, own)
        before = groups.state_dict()
        with fault():
            step = groups.begin()
            assert (step.number, step.joining) == (7, ("b",))
            assert not stepped(groups, model, optimizer, own)
        assert groups.state_dict() == before  # nothing was loaded
        step = groups.begin()
        assert (step.number, step.contributors, step.joining) == (7, ("a",), ("b",))
        assert stepped(groups, model, optimizer, own)
        assert groups.steps == 8
        assert equal_on_all_ranks(model)
        step = groups.begin()
        assert (step.number, step.contributors) == (8, ("a", "b"))
        assert stepped(groups, model, optimizer, own)
        assert equal_on_all_ranks(model)


@distributed(2)
def test_a_state_that_is_half_loaded_ends_its_group_alone() -> None:
    def fails(*args: Any) -> Any:
        raise ValueError("of a test")

    with replica_groups([1, 1]) as (groups, mesh, own):
        model, optimizer = carried(groups, mesh, own)
        groups.begin()
        with patch.object(state, "flatten_sharded_optim_state_dict", fails):
            if own == 0:
                assert stepped(groups, model, optimizer, own)
                return
            with pytest.raises(ReplicaGroupError, match="cannot be loaded"):
                stepped(groups, model, optimizer, own)
        assert groups.steps == 0
        for call in (groups.begin, groups.state_dict):
            with pytest.raises(ReplicaGroupError, match="not loaded to its end"):
                call()


@distributed(2)
def test_a_state_that_does_not_fit_is_refused_before_it_is_loaded() -> None:
    with replica_groups([1, 1]) as (groups, mesh, own):
        model, optimizer = carried(groups, mesh, own)
        if own == 1:
            model.register_buffer("mine", torch.ones(2))
        before = [local_shard(each).clone() for each in model.parameters()]
        groups.begin()
        if own == 0:
            assert not stepped(groups, model, optimizer, own)
            return
        with pytest.raises(ReplicaGroupError, match=r"buffer mine has shape \(2,\)"):
            stepped(groups, model, optimizer, own)
        assert groups.steps == 0
        after = [local_shard(each) for each in model.parameters()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@distributed(2)
def test_a_group_that_cannot_join_raises_before_the_others_do() -> None:
    def fails(*args: Any) -> Future[Any]:
        found: Future[Any] = Future()
        found.set_exception(ConnectionError("of a test"))
        return found

    with (
        replica_groups([1, 1], max_dropped=4) as (groups, mesh, own),
        patch.object(Recovery, "receive", fails),
        patch.object(Recovery, "send", lambda *_: None),
    ):
        model, optimizer = carried(groups, mesh, own)
        for _ in range(2):
            groups.begin()
            assert not stepped(groups, model, optimizer, own)
        groups.begin()
        if own == 0:
            assert not stepped(groups, model, optimizer, own)
        else:
            with pytest.raises(ReplicaGroupError, match="3 steps in a row were dropped"):
                stepped(groups, model, optimizer, own)


def test_a_transfer_does_not_wait_for_one_of_a_dropped_step() -> None:
    second, release = threading.Event(), threading.Event()
    made: list[Any] = []

    class Link:
        """The first one connects when it is released: a rank that it waits for was lost."""

        size = 1

        def __init__(self, *_: Any) -> None:
            made.append(self)
            if len(made) == 1:
                release.wait()
            else:
                second.set()

        def close(self) -> None:
            pass

    run = Member(name="a", ranks=1, step=0, batches=0, lineage="", model="")
    quorum = Quorum(number=1, names=("a",), own=0, store="")
    roster = Roster(quorum=quorum, members=(run,), own=0)
    transfers = Recovery(0, 1.0)
    with patch.object(recovery, "_Link", Link):
        for _ in range(2):
            transfers.end()
            transfers.send(roster, dist.HashStore(), ({}, []))
        connected = second.wait(20)
        release.set()
        transfers.close()
    assert connected
