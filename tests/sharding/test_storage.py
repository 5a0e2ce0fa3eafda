"""Memory of unsharded parameters (DESIGN 3.7): the same while a graph holds it, refilled, freed.

This is about memory of a rank's own; ``test_shared_buffers.py`` is about what ranks share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.comm import Event, EventKind, observe
from fullshard.sharding import Schedule
from fullshard.sharding.base.states import ShardedState
from support.apart import private_memory
from support.events.models import batch, make_net
from support.events.recorder import (
    assert_gradients_of,
    group_of,
    ours,
)
from support.ranks import distributed


def groups_of(net: Any) -> dict[str, Any]:
    return {"": group_of(net)} | {
        f"blocks.{index}": group_of(block) for index, block in enumerate(net.blocks)
    }


def identity(tensor: torch.Tensor) -> int:
    """What tells one storage from another, whatever memory it has now."""
    return tensor.untyped_storage()._cdata


def storages(net: nn.Module) -> dict[str, set[int]]:
    return {
        name: {identity(param.unsharded) for param in group.params}
        for name, group in groups_of(net).items()
    }


class Aliases:
    """What graphs save of weights, compared when backward wants it with what it was in forward.

    The definition of right memory: what backward reads is what forward read, in the storage that
    the parameter still has.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.seen = 0
        self.wrong: list[str] = []

    def pack(self, tensor: torch.Tensor) -> Any:
        for name, group in groups_of(self.net).items():
            for param in group.params:
                full = param.unsharded
                # a weight, or an alias of it such as weight.t(): same storage, same place in it
                if (
                    group.state is ShardedState.UNSHARDED
                    and identity(full) == identity(tensor)
                    and full.data_ptr() == tensor.data_ptr()
                    and full.numel() == tensor.numel()
                ):
                    return tensor, tensor.detach().clone(), (name, param)
        return tensor, None, ("", None)

    def unpack(self, packed: Any) -> torch.Tensor:
        tensor, value, (name, param) = packed
        if value is not None:
            self.seen += 1
            if tensor.untyped_storage().nbytes() == 0:
                self.wrong.append(f"{name}: freed")
            elif not torch.equal(tensor.detach(), value):
                self.wrong.append(f"{name}: other values")
            elif identity(param.unsharded) != identity(tensor):
                self.wrong.append(f"{name}: other storage")
        return tensor

    def watch(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


def one_forward(net: nn.Module) -> torch.Tensor:
    return net(batch()).square().sum()


def two_forwards(net: nn.Module) -> torch.Tensor:
    """Two forwards whose graphs live at the same time."""
    return net(batch(seed=1)).square().sum() + net(batch(seed=2)).sum()


def a_forward_between(net: nn.Module) -> torch.Tensor:
    """A forward without gradients before the backward: refills everything once more."""
    loss = net(batch()).square().sum()
    with torch.no_grad():
        net(batch(seed=5))
    return loss


RUNS = [one_forward, two_forwards, a_forward_between]


def check_aliases(run: Callable[[nn.Module], torch.Tensor], **arguments: Any) -> None:
    """Fails if backward reads anything but what forward read."""
    net = make_net(ours, **arguments)
    for _ in range(2):
        net.zero_grad()
        aliases = Aliases(net)
        with aliases.watch():
            loss = run(net)
        loss.backward()
        assert aliases.seen > 0, "the graph saved aliases of weights"
        assert aliases.wrong == [], f"backward read {aliases.wrong}"
    plain = make_net(None)
    run(plain).backward()
    assert_gradients_of(net, plain)


def check_identity(run: Callable[[nn.Module], torch.Tensor], **arguments: Any) -> None:
    """Fails if a group's storage changes or is shared with another group at any gather."""
    net = make_net(ours, **arguments)
    run(net).backward()
    wanted = storages(net)
    seen: list[dict[str, set[int]]] = []

    class AtEachGather:
        def on_event(self, event: Event) -> None:
            if event.kind is EventKind.WAIT:
                seen.append(storages(net))

    with observe(AtEachGather()):
        for _ in range(2):
            run(net).backward()
    assert seen
    assert all(each == wanted for each in seen), "a storage changed"
    everything = [storage for group in wanted.values() for storage in group]
    assert len(set(everything)) == len(everything), "no two groups share a storage"


# -- the same storage -----------------------------------------------------------------------------


@pytest.mark.cross
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("run", RUNS)
@distributed(2)
def test_what_backward_reads_is_what_forward_read(
    run: Callable[[nn.Module], torch.Tensor], reshard: bool | None
) -> None:
    check_aliases(run, reshard_after_forward=reshard)


@pytest.mark.parametrize("run", RUNS)
@distributed(2)
def test_a_group_keeps_its_storage_and_shares_it_with_no_other(
    run: Callable[[nn.Module], torch.Tensor],
) -> None:
    check_identity(run)


@distributed(2)
def test_an_alias_taken_by_hand_is_the_same_memory_after_a_refill() -> None:
    with private_memory():
        net = make_net(ours)
        aliases: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def take(module: nn.Linear, *_: object) -> None:
            weight = module.weight
            aliases.append((weight, weight.t(), weight.detach().clone()))

        net.blocks[0].up.register_forward_hook(take)
        net(batch()).sum().backward()
        weight, transposed, value = aliases[0]
        assert transposed.untyped_storage().nbytes() == 0, "resharded: the alias has no memory"
        net.blocks[0].unshard()
        assert net.blocks[0].up.weight is weight
        assert identity(transposed) == identity(weight)
        assert torch.equal(transposed, value.t())
        net.blocks[0].reshard()


# -- version counters -----------------------------------------------------------------------------


@distributed(2)
def test_two_parameters_of_a_group_do_not_share_a_version_counter() -> None:
    net = make_net(ours)
    net.blocks[0].unshard()
    first, second = (param.unsharded for param in group_of(net.blocks[0]).params[:2])
    before = second._version
    with torch.no_grad():
        first.add_(1)
    assert second._version == before
    net.blocks[0].reshard()


# -- freed ----------------------------------------------------------------------------------------


def allocated(net: nn.Module) -> list[str]:
    """The groups whose unsharded parameters have memory now."""
    names = []
    for name, group in groups_of(net).items():
        sizes = {param.unsharded.untyped_storage().nbytes() > 0 for param in group.params}
        assert len(sizes) == 1
        if sizes.pop():
            names.append(name)
    return names


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_memory_is_there_exactly_while_a_group_is_unsharded(reshard: bool | None) -> None:
    with private_memory():
        net = make_net(ours, reshard_after_forward=reshard)
        net.set_schedule(Schedule())  # with others it may be there before
        seen = []

        class AtEachEvent:
            def on_event(self, event: Event) -> None:
                if event.kind in (EventKind.WAIT, EventKind.RESHARD, EventKind.POST_FORWARD):
                    wanted = [
                        name
                        for name, group in groups_of(net).items()
                        if group.state is ShardedState.UNSHARDED
                    ]
                    seen.append((allocated(net), wanted))

        net(batch()).sum().backward()
        with observe(AtEachEvent()):
            net(batch(requires_grad=True)).sum().backward()
        assert seen and all(got == wanted for got, wanted in seen)
        assert allocated(net) == []
        peak = max(len(got) for got, _ in seen)
        assert peak == (2 if reshard is not False else 4), "the root and one block at a time"


@distributed(2)
def test_memory_is_freed_after_each_way_to_hold_it() -> None:
    with private_memory():
        net = make_net(ours)
        net(batch()).sum().backward()
        assert allocated(net) == []
        net.blocks[1].unshard()
        assert allocated(net) == ["blocks.1"]
        net.blocks[1].reshard()
        assert allocated(net) == []
        handle = net.blocks[1].unshard(async_op=True)
        assert allocated(net) == [], "full parameters get their memory when the gather is done"
        handle.wait()
        assert allocated(net) == ["blocks.1"]
        net.blocks[1].reshard()
        output = net(batch())
        del output
        assert allocated(net) == []
        checkpoint(net, batch(requires_grad=True), use_reentrant=True).sum().backward()
        assert allocated(net) == []
