"""A world of one: unsharded parameters are the shards, and their gradients the reduced ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.comm import AllGather, DefaultAllGather, EventKind, EventLog, SelfTransport, observe
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard, replicate, unsharded
from fullshard.sharding.base.compat import local_shard
from support.dispatch import StorageCounter
from support.ranks import cpu_mesh, distributed

_MOVED = {EventKind.COPY_IN, EventKind.ALL_GATHER, EventKind.COPY_OUT, EventKind.REDUCE_SCATTER}


def _alone() -> DeviceMesh:
    return cpu_mesh((dist.get_world_size(), 1), ("others", "alone"))["alone"]


def _plain() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4, bias=False))


def _model(**options: Any) -> Any:
    model = _plain()
    for layer in _layers(model):
        fully_shard(layer, mesh=_alone(), **options)
    return model


def _layers(model: Any) -> tuple[Any, Any, Any]:
    """Those that have a group, and the root, which has none."""
    return model[0], model[2], model


def _batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))


def _local(param: torch.Tensor) -> torch.Tensor:
    assert isinstance(param, DTensor)
    return param.to_local()


def _seen(model: Any, act: Callable[[torch.Tensor], object]) -> None:
    """Calls ``act`` with the weight of the last layer as its forward sees it."""

    def hook(module: Any, args: object) -> None:
        act(module.weight)

    handle = model[2].register_forward_pre_hook(hook)
    model(_batch())
    handle.remove()


def _lie_together(model: Any) -> bool:
    found: list[bool] = []
    shard = _local(model[2].weight)
    _seen(model, lambda weight: found.append(weight.data_ptr() == shard.data_ptr()))
    return found == [True]


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_parameters_lie_where_the_shards_do(reshard: bool | None) -> None:
    model = _model(reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        assert _lie_together(model)
        model(_batch()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@distributed(2)
def test_a_step_copies_no_parameter_and_no_gradient() -> None:
    """What the engine itself makes or copies of the size of a parameter: nothing."""
    model = _model()
    model(_batch()).sum().backward()
    log = EventLog()
    with observe(log), StorageCounter() as counter:
        model(_batch()).sum().backward()
    kinds = {event.kind for event in log.events}
    assert EventKind.UNSHARD in kinds and EventKind.REDUCE_DONE in kinds
    assert not kinds & _MOVED
    assert counter.nbytes == 0, counter.made


@distributed(2)
def test_the_gradient_is_the_tensor_that_autograd_made() -> None:
    model, made = _model(), []

    def note(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        made.append(weight.grad.data_ptr())

    _seen(model, lambda weight: weight.register_post_accumulate_grad_hook(note))
    model(_batch()).sum().backward()
    first = _local(model[2].weight.grad)
    value = first.clone()
    model(_batch()).sum().backward()  # is added to it
    assert first.data_ptr() == _local(model[2].weight.grad).data_ptr() == made[0]
    assert torch.equal(first, 2 * value)


@distributed(2)
def test_training_equals_the_unsharded_model_also_where_graphs_live_on() -> None:
    for options in ({}, {"reshard_after_forward": False}):
        model, plain = _model(**options), _plain()
        ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain))
        kept = []
        for step in range(4):
            for each, optimizer in ((model, ours), (plain, theirs)):
                out = each(_batch(step))
                kept.append(out)  # its graph holds aliases of the parameters
                out.square().sum().backward(retain_graph=True)
                optimizer.step()
                optimizer.zero_grad()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(_local(one), other)


@pytest.mark.parametrize("graph", [False, True], ids=["idle", "graph-alive"])
@distributed(2)
def test_what_a_user_writes_to_unsharded_parameters_stays_out_of_the_shards(graph: bool) -> None:
    model = _model(reshard_after_forward=False)
    before = [_local(param).clone() for param in model.parameters()]
    out = model(_batch()) if graph else None
    for layer in _layers(model):
        layer.unshard()
    for param in model.parameters():
        assert not isinstance(param, DTensor)
        param.data.fill_(7.0)  # unseen by autograd, which would raise for the graph
    for layer in _layers(model):
        layer.reshard()
    with unsharded(model):
        model[2].weight.data.fill_(8.0)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(_local(param), value)
    if out is not None:
        out.sum().backward()
        plain = _plain()
        plain(_batch()).sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and torch.equal(_local(one.grad), other.grad)


@distributed(2)
def test_with_writeback_changes_arrive() -> None:
    model = _model()
    with unsharded(model, writeback=True), torch.no_grad():
        model[2].weight.fill_(8.0)
    assert _local(model[2].weight).eq(8).all()
    assert _lie_together(model)


@pytest.mark.parametrize("graph", [False, True], ids=["idle", "graph-alive"])
@pytest.mark.parametrize("way", ["assign", "moved"])
@distributed(2)
def test_replaced_shards_are_used_and_the_old_ones_left_alone(way: str, graph: bool) -> None:
    model = _model(reshard_after_forward=False)
    model(_batch()).sum().backward()
    old = [_local(param).detach() for param in model.parameters()]
    before = [shard.clone() for shard in old]
    out = model(_batch()) if graph else None
    for layer in _layers(model):
        layer.reshard()
    if way == "moved":
        for param in model.parameters():
            local = local_shard(param)
            local.data = local.detach() + 1
    else:
        state = {name: value.detach() + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    plain = _plain()
    with torch.no_grad():
        for other in plain.parameters():
            other += 1
    assert torch.equal(model(_batch(3)), plain(_batch(3)))
    assert all(map(torch.equal, old, before))
    if out is not None:
        out.sum().backward()


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_what_is_cast_is_cast_into_memory_of_its_own_and_nothing_else(reshard: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = _model(mp_policy=policy, reshard_after_forward=reshard), _plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        assert not _lie_together(model)
        with torch.no_grad():
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                other.copy_(_local(one) if isinstance(one, DTensor) else one)
        log = EventLog()
        with observe(log):
            out = model(_batch(step).bfloat16())
            out.sum().backward()
        wanted = copy.deepcopy(plain).bfloat16()
        assert torch.equal(out, wanted(_batch(step).bfloat16()))
        assert all(param.grad.dtype is torch.float32 for param in model.parameters())
        kinds = {event.kind for event in log.events}
        assert EventKind.COPY_OUT in kinds and EventKind.ALL_GATHER not in kinds
        optimizer.step()
        optimizer.zero_grad()


class _Counting(AllGather):
    """A collective of a user's own, which is to be called."""

    def __init__(self) -> None:
        self.calls = 0
        self.inner = DefaultAllGather(transport=SelfTransport())

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


@distributed(2)
def test_a_collective_of_a_users_own_is_called_also_from_the_middle_of_a_step_on() -> None:
    model, counting = _model(), _Counting()
    before = [_local(param).clone() for param in model.parameters()]
    out = model(_batch())
    for layer in _layers(model):
        layer.set_custom_all_gather(counting)
    out.sum().backward()
    model(_batch()).sum().backward()
    assert counting.calls > 2
    assert not _lie_together(model)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(_local(param), value)


@distributed(2)
def test_replicas_share_the_memory_of_parameters_and_reduce_their_gradients() -> None:
    model, plain = _plain(), _plain()
    for layer in _layers(model):
        replicate(layer, mesh=cpu_mesh((2,), ("replicas",)))
    model(_batch(dist.get_rank())).sum().backward()
    for rank in range(2):
        (plain(_batch(rank)).sum() / 2).backward()
    assert _lie_together(model)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(_local(one.grad), other.grad)
