"""What ranks must agree on: a mismatch raises on every rank, before any gather, with a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.comm import DefaultAllGather, DefaultReduceScatter, EventLog, observe
from fullshard.policies import DepthPrefetch, MixedPrecisionPolicy
from fullshard.sharding import RankMismatchError, fully_shard, unsharded
from support.ranks import cpu_mesh, distributed
from support.surface.model import WIDTH, Net, batch, build, sharded
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


@dataclass(frozen=True)
class Difference:
    """What the odd rank does otherwise, and what the error must name."""

    change: Callable[[Net], Any]
    names: str
    words: tuple[str, ...]


def _wider(net: Net) -> None:
    net.blocks[1].fc1 = nn.Linear(WIDTH, WIDTH + 2)


def _reordered(net: Net) -> None:
    block: Any = net.blocks[0]
    block.fc1 = block._modules.pop("fc1")  # registered last now


def _deeper(net: Net) -> None:
    block: Any = net.blocks[1]
    block.extra = nn.Linear(WIDTH, 2)


def _without_a_bias(net: Net) -> None:
    net.head.bias = None


def _in_bfloat16(net: Net) -> None:
    net.head.weight = nn.Parameter(net.head.weight.detach().bfloat16())


def _frozen(net: Net) -> None:
    net.stem.bias.requires_grad_(False)


def _tied(net: Net) -> None:
    block: Any = net.blocks[0]
    net.stem.bias = block.fc2.bias


DIFFERENCES = {
    "shape": Difference(_wider, "blocks.1.fc1.weight", ("(7, 6)", "(8, 6)")),
    "order": Difference(_reordered, "blocks.0.fc1.weight", ("blocks.0.fc2.weight",)),
    "number": Difference(_deeper, "blocks.1.extra.weight", ()),
    "missing last": Difference(_without_a_bias, "head.bias", ()),
    "dtype": Difference(_in_bfloat16, "head.weight", ("float32", "bfloat16")),
    "requires_grad": Difference(
        _frozen, "stem.bias", ("requires_grad=True", "requires_grad=False")
    ),
    "tying": Difference(_tied, "stem.bias", ()),
}


@pytest.mark.cross
@pytest.mark.parametrize("kind", DIFFERENCES)
@distributed(2, 4, timeout=TIMEOUT)
def test_parameters_that_differ_in_one_rank_raise_on_every_rank_with_their_full_name(
    kind: str,
) -> None:
    difference = DIFFERENCES[kind]
    odd = dist.get_world_size() - 1
    net = build()
    if dist.get_rank() == odd:
        difference.change(net)
    message = _message_of_the_mismatch(sharded(net), batch())
    assert difference.names in message
    assert f"rank {odd}" in message
    for word in difference.words:
        assert word in message


@distributed(2, timeout=TIMEOUT)
def test_a_mismatch_raises_again_at_the_next_forward() -> None:
    net = build()
    if dist.get_rank() == 1:
        _wider(net)
    sharded(net)
    first = _message_of_the_mismatch(net, batch())
    assert _message_of_the_mismatch(net, batch()) == first


@distributed(2, timeout=TIMEOUT)
def test_a_mismatch_raises_in_unshard_too() -> None:
    net = build()
    if dist.get_rank() == 1:
        _wider(net)
    model: Any = sharded(net)
    with pytest.raises(RankMismatchError, match=r"blocks\.1\.fc1\.weight"):
        model.unshard()
    assert len(set(everyone("in step"))) == 1


@distributed(2, timeout=TIMEOUT)
def test_a_rank_that_did_not_shard_a_block_by_itself_raises_on_every_rank() -> None:
    net = build()
    fully_shard(net.blocks[0])
    if dist.get_rank() == 0:
        fully_shard(net.blocks[1])
    message = _message_of_the_mismatch(fully_shard(net), batch())
    assert "blocks.1" in message


@distributed(2, timeout=TIMEOUT)
def test_a_rank_that_ignores_a_parameter_raises_on_every_rank() -> None:
    net = build()
    weight: Any = net.head.weight
    ignored = {weight} if dist.get_rank() == 1 else None
    message = _message_of_the_mismatch(fully_shard(net, ignored_params=ignored), batch())
    assert "head.weight" in message


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype"])
@distributed(2, timeout=TIMEOUT)
def test_another_mixed_precision_on_one_rank_raises_on_every_rank(field: str) -> None:
    fields: dict[str, Any] = {field: torch.bfloat16 if dist.get_rank() == 1 else None}
    policy = MixedPrecisionPolicy(**fields)
    message = _message_of_the_mismatch(fully_shard(build(), mp_policy=policy), batch())
    assert "stem.weight" in message
    assert "bfloat16" in message


@distributed(2, timeout=TIMEOUT)
def test_another_dim_to_cut_along_on_one_rank_raises_on_every_rank() -> None:
    dim = dist.get_rank()
    net = nn.Linear(4, 4, bias=False)
    message = _message_of_the_mismatch(
        fully_shard(net, shard_placement_fn=lambda param: Shard(dim)), torch.ones(1, 4)
    )
    assert "weight" in message
    assert "dim 0" in message
    assert "dim 1" in message


@distributed(2, timeout=TIMEOUT)
def test_another_reshard_after_forward_on_one_rank_raises_on_every_rank() -> None:
    # one rank would gather again in backward, and wait for ever for the other
    reshard = dist.get_rank() == 1
    message = _message_of_the_mismatch(sharded(build(), reshard_after_forward=reshard), batch())
    assert "module '(root)' resharded after forward: False" in message
    assert "module '(root)' resharded after forward: True" in message


@distributed(4, timeout=TIMEOUT)
def test_another_smaller_world_on_one_rank_raises_on_every_rank() -> None:
    fully_shard(nn.Linear(2, 2), reshard_after_forward=2)  # makes its process groups, on all ranks
    reshard = 2 if dist.get_rank() == 1 else True
    net = sharded(build(), reshard_after_forward=reshard)
    message = _message_of_the_mismatch(net, batch())
    assert "post-forward mesh of: [2]" in message
    assert "post-forward mesh of: [0]" in message


@distributed(2, timeout=TIMEOUT)
def test_another_prefetch_policy_on_one_rank_raises_on_every_rank() -> None:
    policy = DepthPrefetch(forward=1 + dist.get_rank())
    message = _message_of_the_mismatch(sharded(build(), prefetch_policy=policy), batch())
    assert "DepthPrefetch(forward=1" in message
    assert "DepthPrefetch(forward=2" in message


@pytest.mark.parametrize(
    ("setter", "value", "words"),
    [
        ("set_gather_bucket_cap", 3.0, "share launches up to 3 MiB"),
        ("set_reduce_bucket_cap", 3.0, "reductions up to 3 MiB"),
        ("set_force_sum_reduction_for_comms", True, "sums only: True"),
    ],
)
@distributed(2, timeout=TIMEOUT)
def test_another_setting_of_communication_on_one_rank_raises_on_every_rank(
    setter: str, value: Any, words: str
) -> None:
    net: Any = sharded(build())
    if dist.get_rank() == 1:
        getattr(net.blocks[1], setter)(value)
    message = _message_of_the_mismatch(net, batch())
    assert "rank 1 has parameter group 'blocks.1'" in message
    assert words in message


@distributed(2, 4, timeout=TIMEOUT)
def test_a_model_without_parameters_on_one_rank_raises_on_every_rank() -> None:
    odd = dist.get_rank() == 0
    model = fully_shard(nn.Identity() if odd else nn.Linear(4, 4), mesh=cpu_mesh())
    assert "weight" in _message_of_the_mismatch(model, torch.ones(1, 4))


@distributed(2, 4, timeout=TIMEOUT)
def test_a_parameter_on_meta_on_one_rank_raises_on_every_rank() -> None:
    odd = dist.get_world_size() - 1
    net = build()
    if dist.get_rank() == odd:
        net.head.to("meta")
    message = _message_of_the_mismatch(sharded(net), batch())
    assert "head.weight" in message
    assert "head.bias" in message
    assert "meta" in message
    assert "to_empty" in message
    assert f"rank {odd}" in message


@distributed(2, 4, timeout=TIMEOUT)
def test_a_parameter_replaced_on_one_rank_raises_on_every_rank() -> None:
    net = sharded(build())
    odd = dist.get_world_size() - 1
    if dist.get_rank() == odd:
        net.stem.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    message = _message_of_the_mismatch(net, batch())
    assert "stem.weight" in message
    assert f"rank {odd}" in message


@distributed(2, timeout=TIMEOUT)
def test_a_parameter_replaced_on_every_rank_is_an_error_that_names_it() -> None:
    net = sharded(build())
    block: Any = net.blocks[1]
    block.fc2.bias = nn.Parameter(torch.zeros(WIDTH))
    log = EventLog()
    with observe(log), pytest.raises(ValueError, match=r"blocks\.1\.fc2\.bias was replaced by"):
        net(batch())
    assert never_gathered(log)


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


def _shape_on_the_last_rank(net: Net) -> None:
    _wider(net)


def _meta_on_the_last_rank(net: Net) -> None:
    block: Any = net.blocks[1]
    block.fc1.to("meta")


@pytest.mark.parametrize("change", [_shape_on_the_last_rank, _meta_on_the_last_rank])
@distributed(4, timeout=TIMEOUT)
def test_a_mismatch_in_one_replica_raises_on_every_rank_of_a_2d_mesh(
    change: Callable[[Net], None],
) -> None:
    net = build()
    if dist.get_rank() == 3:
        change(net)
    sharded(net, mesh=cpu_mesh((2, 2), ("replicate", "shard")))
    with pytest.raises(RankMismatchError, match=r"blocks\.1\.fc1\.weight"):
        net(batch())
    assert everyone("in step") == ["in step"] * 4


@distributed(4, timeout=TIMEOUT)
def test_replicas_that_differ_from_each_other_raise_on_every_rank() -> None:
    net = build()
    if dist.get_rank() >= 2:  # each shard group agrees within itself
        _wider(net)
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
