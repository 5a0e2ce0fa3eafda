"""What ranks must agree on: a mismatch raises on every rank, before any gather, with a name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.comm import DefaultAllGather, DefaultReduceScatter, EventLog, observe
from fullshard.comm.transports import default
from fullshard.policies import DepthPrefetch, MixedPrecisionPolicy
from fullshard.sharding import RankMismatchError, Schedule, fully_shard, unsharded
from support.ranks import cpu_mesh, distributed, new_group
from support.surface.model import WIDTH, batch, build, sharded
from support.surface.ranks import everyone, never_gathered

TIMEOUT = 20.0  # seconds: a rank that is left waiting must not hold up the run for long


def _message_of_the_mismatch(model: nn.Module, x: torch.Tensor) -> str:
    """What every rank raised in the first forward, after the checks that any mismatch must pass."""
    log = EventLog()
    with observe(log), pytest.raises(RankMismatchError) as caught:
        model(x)
    assert never_gathered(log)
    messages = everyone(str(caught.value))
    assert len(set(messages)) == 1, messages
    return messages[0]


def _wider(net: Any) -> None:
    net.blocks[1].fc1 = nn.Linear(WIDTH, WIDTH + 2)


def _reordered(net: Any) -> None:
    net.blocks[0].fc1 = net.blocks[0]._modules.pop("fc1")  # registered last now


def _deeper(net: Any) -> None:
    net.blocks[1].extra = nn.Linear(WIDTH, 2)


def _without_a_bias(net: Any) -> None:
    net.head.bias = None


def _in_bfloat16(net: Any) -> None:
    net.head.weight = nn.Parameter(net.head.weight.detach().bfloat16())


def _tied(net: Any) -> None:
    net.stem.bias = net.blocks[0].fc2.bias


def _replaced(net: Any) -> None:
    net.stem.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


@dataclass(frozen=True)
class Difference:
    """What the odd rank, which is the last, does otherwise.

    Attributes:
        make: a sharded model, given whether this rank is the odd one.
        words: what the error must name; ``{odd}`` stands for the rank.
    """

    make: Callable[[bool], Any]
    words: tuple[str, ...]


def changed(change: Callable[[Any], object], *words: str) -> Difference:
    """The odd rank changes its model before it shards it."""

    def make(odd: bool) -> Any:
        net = build()
        if odd:
            change(net)
        return sharded(net)

    return Difference(make, ("rank {odd}", *words))


def changed_later(change: Callable[[Any], object], *words: str) -> Difference:
    """The odd rank changes its sharded model."""

    def make(odd: bool) -> Any:
        net = sharded(build())
        if odd:
            change(net)
        return net

    return Difference(make, ("rank {odd}", *words))


def given(option: str, mine: Callable[[bool], Any], *words: str) -> Difference:
    """The odd rank gives an option another value."""
    return Difference(lambda odd: sharded(build(), **{option: mine(odd)}), words)


def _of_one_group_less(odd: bool) -> Any:
    net = build()
    for block in net.blocks if odd else net.blocks[:1]:
        fully_shard(block)
    return fully_shard(net)


def _ignoring(odd: bool) -> Any:
    net: Any = build()
    return fully_shard(net, ignored_params={net.head.weight} if odd else None)


def _without_parameters(odd: bool) -> Any:
    return fully_shard(nn.Linear(WIDTH, 4) if odd else nn.Identity(), mesh=cpu_mesh())


def _without_policies(odd: bool) -> Any:
    """As if a package that offers a schedule were not installed on the odd rank."""
    where = "fullshard.sharding.hooks.context.SCHEDULES"
    with patch(where, [Schedule]) if odd else nullcontext():
        return sharded(build())


BFLOAT16 = torch.bfloat16
GROUP = "rank {odd} has parameter group 'blocks.1'"
DIFFERENCES = {
    "shape": changed(_wider, "blocks.1.fc1.weight", "(7, 6)", "(8, 6)"),
    "order": changed(_reordered, "blocks.0.fc1.weight", "blocks.0.fc2.weight"),
    "number": changed(_deeper, "blocks.1.extra.weight"),
    "missing last": changed(_without_a_bias, "head.bias"),
    "dtype": changed(_in_bfloat16, "head.weight", "float32", "bfloat16"),
    "requires_grad": changed(
        lambda net: net.stem.bias.requires_grad_(False),
        "stem.bias",
        "requires_grad=True",
        "requires_grad=False",
    ),
    "tying": changed(_tied, "stem.bias"),
    "on meta": changed(
        lambda net: net.head.to("meta"), "head.weight", "head.bias", "meta", "to_empty"
    ),
    "replaced": changed_later(_replaced, "stem.weight"),
    "a group less": Difference(_of_one_group_less, ("blocks.1",)),
    "ignored": Difference(_ignoring, ("head.weight",)),
    "no parameters": Difference(_without_parameters, ("weight",)),
    "param_dtype": given(
        "mp_policy",
        lambda odd: MixedPrecisionPolicy(param_dtype=BFLOAT16 if odd else None),
        "weight",
        "bfloat16",
    ),
    "reduce_dtype": given(
        "mp_policy",
        lambda odd: MixedPrecisionPolicy(reduce_dtype=BFLOAT16 if odd else None),
        "weight",
        "bfloat16",
    ),
    "dim": given(
        "shard_placement_fn",
        lambda odd: lambda param: Shard(odd % param.ndim),
        "weight",
        "dim 0",
        "dim 1",
    ),
    # one rank would gather again in backward, and wait for ever for the other
    "reshard_after_forward": given(
        "reshard_after_forward",
        lambda odd: odd,
        "module '(root)' resharded after forward: False",
        "module '(root)' resharded after forward: True",
    ),
    "prefetch_policy": given(
        "prefetch_policy",
        lambda odd: DepthPrefetch(forward=1 + odd),
        "DepthPrefetch(forward=1",
        "DepthPrefetch(forward=2",
    ),
    "default schedule": Difference(
        _without_policies, ("scheduled by Schedule()", "scheduled by CoalescedSchedule(")
    ),
    "kept storage": changed_later(
        lambda net: net.blocks[1].set_keep_unsharded_storage(True), GROUP, "storage kept: True"
    ),
    "sums only": changed_later(
        lambda net: net.blocks[1].set_force_sum_reduction_for_comms(True), GROUP, "sums only: True"
    ),
}


@pytest.mark.cross
@pytest.mark.parametrize("kind", DIFFERENCES)
@distributed(2, 4, matrix=[4], timeout=TIMEOUT)
def test_a_difference_of_one_rank_raises_on_every_rank_and_is_named(kind: str) -> None:
    difference = DIFFERENCES[kind]
    odd = dist.get_world_size() - 1
    message = _message_of_the_mismatch(difference.make(dist.get_rank() == odd), batch())
    for word in difference.words:
        assert word.replace("{odd}", str(odd)) in message


@distributed(2, timeout=TIMEOUT)
def test_a_mismatch_raises_again_at_the_next_forward_and_in_unshard() -> None:
    net = DIFFERENCES["shape"].make(dist.get_rank() == 1)
    first = _message_of_the_mismatch(net, batch())
    assert _message_of_the_mismatch(net, batch()) == first
    other = DIFFERENCES["shape"].make(dist.get_rank() == 1)
    with pytest.raises(RankMismatchError, match=r"blocks\.1\.fc1\.weight"):
        other.unshard()
    assert len(set(everyone("in step"))) == 1


@distributed(4, timeout=TIMEOUT)
def test_another_smaller_world_on_one_rank_raises_on_every_rank() -> None:
    fully_shard(nn.Linear(2, 2), reshard_after_forward=2)  # makes its process groups, on all ranks
    reshard = 2 if dist.get_rank() == 1 else True
    net = sharded(build(), reshard_after_forward=reshard)
    message = _message_of_the_mismatch(net, batch())
    assert "post-forward mesh of: [2]" in message
    assert "post-forward mesh of: [0]" in message


@distributed(2, timeout=TIMEOUT)
def test_two_different_mistakes_on_two_ranks_are_both_named() -> None:
    net = build()
    if dist.get_rank() == 0:
        net.head.to("meta")
    sharded(net)
    if dist.get_rank() == 1:
        net.stem.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    message = _message_of_the_mismatch(net, batch())
    assert "head.weight" in message
    assert "stem.weight" in message


@distributed(2, timeout=TIMEOUT)
def test_ranks_that_agree_exchange_nothing_after_the_first_forward() -> None:
    net = sharded(build(), reshard_after_forward=False)
    with torch.no_grad():
        net(batch())
        log = EventLog()
        with observe(log):
            if dist.get_rank() == 0:
                net(batch())  # alone: it would wait for ever if anything were exchanged
    assert never_gathered(log)
    assert len(everyone("in step")) == 2


@pytest.mark.parametrize(
    ("change", "ranks"),
    [
        (_wider, (3,)),
        (lambda net: net.blocks[1].fc1.to("meta"), (3,)),
        (_wider, (2, 3)),  # each shard group agrees within itself
    ],
    ids=["shape", "meta", "replicas"],
)
@distributed(4, timeout=TIMEOUT)
def test_a_mismatch_in_or_between_replicas_raises_on_every_rank_of_a_2d_mesh(
    change: Callable[[Any], object], ranks: tuple[int, ...]
) -> None:
    net = build()
    if dist.get_rank() in ranks:
        change(net)
    sharded(net, mesh=cpu_mesh((2, 2), ("replicate", "shard")))
    with pytest.raises(RankMismatchError, match=r"blocks\.1\.fc1\.weight"):
        net(batch())
    assert everyone("in step") == ["in step"] * 4


@distributed(4, timeout=TIMEOUT)
def test_a_mismatch_on_a_part_of_the_ranks_names_global_ranks_and_leaves_the_others_alone() -> None:
    net = build()
    if dist.get_rank() == 3:
        _wider(net)
    sharded(net, mesh=cpu_mesh((2, 2), ("replicate", "shard"))["shard"])
    if dist.get_rank() < 2:
        assert net(batch()).shape == (4, 3)
    else:
        with pytest.raises(RankMismatchError) as caught:
            net(batch())
        assert "rank 2 has blocks.1.fc1.weight: shape (7, 6)" in str(caught.value)
        assert "rank 3 has blocks.1.fc1.weight: shape (8, 6)" in str(caught.value)
    assert everyone("in step") == ["in step"] * 4


class _OverWorld:
    """A transport that asks the default process group, whatever group it is given."""

    in_place = True

    def all_gather(self, output: Any, input: Any, group: Any, async_op: bool) -> None:
        dist.all_gather(list(output.chunk(group.size())), input)

    def reduce_scatter(self, output: Any, input: Any, group: Any, op: Any, async_op: bool) -> None:
        dist.all_reduce(input, op)
        output.copy_(input.chunk(group.size())[group.rank()])


def _over_nothing(width: int) -> Any:
    """A layer whose process group serves neither the CPU nor its device: plug-ins do."""
    group = dist.new_group(backend="cuda:gloo")
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"over_{group.group_name}",))
    torch.manual_seed(0)
    layer = fully_shard(nn.Linear(WIDTH, width), mesh=mesh)
    layer.set_custom_all_gather(DefaultAllGather(transport=_OverWorld()))
    layer.set_custom_reduce_scatter(DefaultReduceScatter(transport=_OverWorld()))
    return layer


@distributed(2)
def test_where_the_group_serves_nothing_the_plug_in_carries_what_ranks_compare() -> None:
    layer = _over_nothing(4)
    layer(torch.ones(2, WIDTH)).sum().backward()
    assert layer.weight.grad.to_local().eq(2.0).all()
    with unsharded(layer, writeback=True), torch.no_grad():
        layer.bias.fill_(3.0)
    assert layer.bias.to_local().eq(3.0).all()


@distributed(2, timeout=TIMEOUT)
def test_where_the_group_serves_nothing_a_mismatch_is_named_on_every_rank() -> None:
    layer = _over_nothing(4 + dist.get_rank())
    with pytest.raises(RankMismatchError) as caught:
        layer(torch.ones(2, WIDTH))
    assert set(everyone(str(caught.value))) == {str(caught.value)}
    assert f"shape (4, {WIDTH})" in str(caught.value) and f"shape (5, {WIDTH})" in str(caught.value)


@distributed(2, timeout=TIMEOUT)
def test_a_rank_without_the_default_transport_of_the_others_is_named() -> None:
    """`fullshard.samehost` is installed on some ranks only: these would wait for the others."""
    mesh = DeviceMesh.from_group(new_group(), "cpu")  # whose ranks share no memory yet
    model = sharded(build(), mesh=mesh)
    here = [default.DefaultTransport()] if dist.get_rank() == 1 else default.DEFAULTS
    with patch.object(default, "DEFAULTS", here):
        message = _message_of_the_mismatch(model, batch())
    assert "rank 0 has" in message and "moved by default by: AutomaticTransport" in message
    assert "rank 1 has" in message and "moved by default by: DefaultTransport" in message
