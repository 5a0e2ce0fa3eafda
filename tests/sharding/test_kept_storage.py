"""``set_keep_unsharded_storage``: full parameters at one address from step to step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.insight import debug_mode
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from fullshard.sharding.base.states import ShardedState
from support.apart import private_memory
from support.events.models import DIM, batch, make_net
from support.events.recorder import (
    assert_all_returned,
    assert_close_to,
    assert_gradients_of,
    full_gradients,
    group_of,
    ours,
    record,
)
from support.gather_hooks import BFloat16Travel
from support.modules import Assembled
from support.ranks import cpu_mesh, distributed, run_on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _groups(net: Any) -> list[Any]:
    return [group_of(each) for each in (net, *net.blocks)]


def _kept_bytes(net: Any) -> int:
    """Bytes allocated for full parameters, by those of all groups."""
    storages = {
        param.unsharded.untyped_storage()._cdata: param.unsharded.untyped_storage().nbytes()
        for group in _groups(net)
        for param in group.params
    }
    return sum(storages.values())


class _Addresses:
    """The addresses at which the linears of a net found their parameters, by name."""

    def __init__(self, net: nn.Module) -> None:
        self.seen: dict[str, set[int]] = {}
        for name, module in net.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._note(name))

    def _note(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: object) -> None:
            for key, param in module.named_parameters():
                self.seen.setdefault(f"{name}.{key}", set()).add(param.data_ptr())

        return note

    @property
    def moved(self) -> list[str]:
        return [name for name, found in self.seen.items() if len(found) > 1]


@contextmanager
def _taken() -> Iterator[list[torch.Tensor]]:
    """Memory that is asked for, so that what others free is not found again at its address."""
    yield [torch.empty(size) for size in (64, 256, 1024) for _ in range(32)]


def _step(net: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    with _taken():
        net(batch(seed=seed)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept after forward": {"reshard_after_forward": False},
    "bf16": {"mp_policy": BF16},
}


@pytest.mark.parametrize("memory", [nullcontext, private_memory], ids=["shared", "private"])
@pytest.mark.parametrize("way", WAYS)
@distributed(2, 1, matrix=[1])
def test_parameters_stay_at_their_addresses_through_training_loading_and_evaluation(
    way: str, memory: Callable[[], Any]
) -> None:
    with memory():
        net, plain = make_net(ours, **WAYS[way]), make_net(ours, **WAYS[way])
        net.set_keep_unsharded_storage(True)
        addresses = _Addresses(net)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (net, plain)]
        for seed in range(3):
            for each, optimizer in zip((net, plain), optimizers, strict=True):
                _step(each, optimizer, seed)
            assert_all_returned(net)
        state = {name: value.detach() + 1 for name, value in net.state_dict().items()}
        for each in (net, plain):
            each.load_state_dict(copy.deepcopy(state))
        outputs = []
        for each in (net, plain):
            with torch.no_grad(), _taken():
                outputs.append(each(batch(seed=9)))
        assert torch.equal(*outputs)
        for block in net.blocks:
            block.unshard()  # a user may write, so in memory of this rank's own
        with torch.inference_mode(), _taken():
            net(batch(seed=9))
        assert len(addresses.seen) == 14
        assert addresses.moved == []


@distributed(2)
def test_memory_stays_allocated_until_it_is_turned_off() -> None:
    with private_memory():
        net = make_net(ours)
        net(batch()).sum().backward()
        assert _kept_bytes(net) == 0
        net.set_keep_unsharded_storage(True)
        assert _kept_bytes(net) == 0
        net(batch()).sum().backward()
        full = _kept_bytes(net)
        assert full >= sum(param.numel() * 4 for param in net.parameters())
        assert [group.state for group in _groups(net)] == [ShardedState.SHARDED] * 4
        net.set_keep_unsharded_storage(False)
        assert _kept_bytes(net) == 0
        net(batch()).sum().backward()
        assert _kept_bytes(net) == 0


@distributed(2)
def test_it_may_be_set_for_one_module_alone() -> None:
    with private_memory():
        net = make_net(ours)
        net.blocks[1].set_keep_unsharded_storage(True)
        net.set_keep_unsharded_storage(True, recurse=False)
        net(batch()).sum().backward()
        kept = [group.params[0].unsharded.untyped_storage().nbytes() > 0 for group in _groups(net)]
    assert kept == [True, False, True, False]


@pytest.mark.parametrize("way", WAYS)
@distributed(2, 1, matrix=[1])
def test_it_can_be_turned_on_and_off_between_steps(way: str) -> None:
    net, plain = make_net(ours, **WAYS[way]), make_net(ours, **WAYS[way])
    for seed, keep in enumerate((False, True, True, False, False, True)):
        net.set_keep_unsharded_storage(keep)
        for each in (net, plain):
            each.zero_grad()
            each(batch(seed=seed)).square().sum().backward()
        assert_close_to(full_gradients(net), full_gradients(plain))


@distributed(2)
def test_it_gathers_no_more_and_no_less() -> None:
    counts = []
    for keep in (False, True):
        net = make_net(ours)
        net.set_keep_unsharded_storage(keep)
        recorder = record(net)
        for _ in range(2):
            net(batch()).sum().backward()
        counts.append(recorder.calls)
    assert counts[0] == counts[1]


def _two() -> Any:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))


def _on_meta() -> Any:
    """It is set before the parameters have memory."""
    with torch.device("meta"):
        net = _two()
    for part in (*net, net):
        ours(part)
    net.set_keep_unsharded_storage(True)
    net.to_empty(device="cpu")
    for param in net.parameters():
        nn.init.ones_(param)
    return net


def _replicas() -> Any:
    return make_net(lambda m: fully_shard(m, mesh=cpu_mesh((2, 2), ("replicas", "shards"))))


def _with_hooks() -> Any:
    """Hooks make something of what was gathered."""
    net = _two()
    for part in net:
        part.weight = nn.Parameter(BFloat16Travel(part.weight.detach()))
        ours(part)
    return ours(net)


@pytest.mark.parametrize(("make", "ranks"), [(_on_meta, 2), (_replicas, 4), (_with_hooks, 2)])
def test_these_stay_at_their_addresses_too(make: Callable[[], Any], ranks: int) -> None:
    def body() -> list[str]:
        net = make()
        net.set_keep_unsharded_storage(True)
        addresses = _Addresses(net)
        for _ in range(3):
            with _taken():
                net(batch()).square().sum().backward()
        return addresses.moved

    assert run_on_ranks(body, ranks) == [[]] * ranks


# -- what autograd may read -----------------------------------------------------------------------


def _keeps(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.kept = module.second(torch.tanh(module.first(x)))
    out: torch.Tensor = x + module.kept.detach()
    return out


def _keeping() -> Any:
    torch.manual_seed(0)
    parts = [
        Assembled(_keeps, first=nn.Linear(DIM, DIM), second=nn.Linear(DIM, DIM)) for _ in range(2)
    ]
    return nn.Sequential(*parts)


@pytest.mark.parametrize("debug", [False, True])
@distributed(1, 2)
def test_backward_may_enter_where_no_module_returned_as_the_values_are_there(debug: bool) -> None:
    net, plain = _keeping(), _keeping()
    for part in (*net, net):
        fully_shard(part)
    net.set_keep_unsharded_storage(True)
    with debug_mode() if debug else nullcontext():
        for _ in range(2):
            for each in (net, plain):
                each(batch())
                each[0].kept.square().sum().backward()
    assert_gradients_of(net, plain)


@distributed(2)
def test_once_turned_off_such_a_backward_raises_again() -> None:
    with private_memory():
        net = _keeping()
        for part in (*net, net):
            fully_shard(part)
        net.set_keep_unsharded_storage(True)
        net(batch())
        net.set_keep_unsharded_storage(False)
        with pytest.raises(RuntimeError, match="is at version 100000000"):
            net[0].kept.square().sum().backward()
