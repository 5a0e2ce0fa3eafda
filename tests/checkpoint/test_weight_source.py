"""A model as a weight source: names, metadata and pieces, against what vLLM's interface defines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from checkpoint.layouts import LAYOUTS, Full, plain, tensor_parallel
from fullshard.checkpoint import Rule, WeightsError, weight_source
from fullshard.checkpoint.engines import metadata
from fullshard.sharding import RankMismatchError, ShardingPlacements, fully_shard, unsharded
from support.modules import in_turn
from support.ranks import cpu_mesh, distributed, new_group
from support.surface.model import build, sharded, train
from support.surface.ranks import assert_equal_state, everyone, full_parameters
from support.surface.wrappings import adamw


def piece(full: torch.Tensor, meta: Any, rank: int) -> torch.Tensor:
    """The definition of placements: ``torch.chunk`` along one axis of the mesh after another."""
    if meta.placements is None:
        return full
    place = meta.owners.index(rank)
    strides = [1]
    for size in meta.mesh_shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    for axis, placement in enumerate(meta.placements):
        size, index = meta.mesh_shape[axis], place // strides[axis] % meta.mesh_shape[axis]
        if isinstance(placement, metadata.Shard):
            chunks = full.chunk(size, placement.dim)
            empty = full.narrow(placement.dim, 0, 0)
            full = chunks[index] if index < len(chunks) else empty
    return full


def _placed(**placements: Any) -> tuple[Any, Full]:
    mesh = cpu_mesh((2, 2), ("outer", "inner"))
    chosen = ShardingPlacements(**placements)
    return sharded(build(), mesh=mesh, placements=chosen), plain(build())


MODELS: dict[str, Callable[[], tuple[Any, Full]]] = {
    **LAYOUTS,
    "ZeRO-1": lambda: _placed(compute=(), gradients=()),
    "hpZ": lambda: _placed(compute="inner"),
    "MiCS": lambda: _placed(optimizer="inner"),
}


@pytest.mark.parametrize("case", MODELS)
@distributed(4)
def test_metadata_are_the_same_on_all_ranks_and_both_iterations_give_what_they_say(
    case: str,
) -> None:
    model, expected = MODELS[case]()
    source = weight_source(model, bucket_bytes=200)
    metas = source.metadata
    assert everyone(metas) == [metas] * 4
    assert [meta.name for meta in metas] == list(expected)
    assert_equal_state(dict(source.iter_full()), expected)
    found = dict(source.iter_local())
    rank = dist.get_rank()
    assert list(found) == source.owned_names(rank) == list(expected)
    for meta in metas:
        assert (meta.dtype, meta.shape) == (expected[meta.name].dtype, expected[meta.name].shape)
        assert torch.equal(found[meta.name], piece(expected[meta.name], meta, rank)), meta
    if case not in ("replicas", "unwrapped"):
        held = sum(value.numel() for value in found.values())
        assert held < sum(value.numel() for value in expected.values())


@distributed(4)
def test_what_tensor_parallelism_leaves_alone_is_copied_along_its_axis() -> None:
    model, _ = tensor_parallel(7)
    metas = {meta.name: meta for meta in weight_source(model).metadata}
    norm, head = metas["blocks.0.norm.weight"], metas["head.weight"]
    assert head.owners == (0, 1, 2, 3)
    assert head.mesh_shape == norm.mesh_shape == (2, 2)
    assert head.placements == (metadata.Shard(0), metadata.Replicate())
    assert metas["blocks.0.down.weight"].placements == (metadata.Shard(0), metadata.Shard(1))
    assert metas["blocks.0.up.weight"].placements is None  # tp cuts the dim first, then dp


@distributed(4)
def test_metadata_and_iter_full_name_the_ranks_that_get_tensors() -> None:
    source = weight_source(sharded(build()), to=[1, 3], dtype=torch.bfloat16)
    rank, found = dist.get_rank(), dict(source.iter_full())
    assert {meta.owners for meta in source.metadata} == {(1, 3)}
    assert list(found) == source.owned_names(rank)
    if rank in (1, 3):
        assert_equal_state(found, {k: v.bfloat16() for k, v in plain(build()).items()})
    assert source.implements_iter_full()
    assert not source.implements_iter_local()
    with pytest.raises(ValueError, match=r"made with to=\[1, 3\]"):
        source.iter_local()


@distributed(2)
def test_of_a_model_that_is_whole_on_every_rank_the_named_ranks_give_theirs() -> None:
    source = weight_source(build(), to=[0])
    assert {meta.owners for meta in source.metadata} == {(0,)}
    expected = plain(build()) if dist.get_rank() == 0 else {}
    assert_equal_state(dict(source.iter_full()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])  # the latter casts nothing
@pytest.mark.parametrize("local", [False, True])
@distributed(2)
def test_values_are_those_of_the_pin_and_later_ones_those_of_the_call(
    local: bool, dtype: torch.dtype | None
) -> None:
    net = sharded(build())
    source, optimizer = weight_source(net, dtype=dtype), adamw(net.parameters())

    def values() -> list[tuple[str, torch.Tensor]]:
        return list(source.iter_local() if local else source.iter_full())

    def expected() -> Full:
        whole, metas = full_parameters(net), {meta.name: meta for meta in source.metadata}
        cast = {name: value.to(dtype or value.dtype) for name, value in whole.items()}
        if local:
            cast = {n: piece(value, metas[n], dist.get_rank()) for n, value in cast.items()}
        return cast

    pinned, found = expected(), list[tuple[str, torch.Tensor]]()
    source.pin(local=local)
    engine = threading.Thread(target=lambda: found.extend(values()))
    train(net, optimizer, range(1))
    engine.start()
    train(net, optimizer, range(1, 3))
    engine.join()
    assert_equal_state(dict(found), pinned)
    assert not torch.equal(pinned["head.weight"], expected()["head.weight"])
    assert_equal_state(dict(values()), expected())


@distributed(2)
def test_renamed_tensors_have_the_names_shapes_and_values_of_the_files() -> None:
    torch.manual_seed(0)
    net = in_turn(one=nn.Linear(6, 4), two=nn.Linear(6, 4), three=nn.Linear(4, 6))
    one, two, three = (layer.weight.detach().clone() for layer in net)
    biases = [layer.bias.detach().clone() for layer in net]
    source = weight_source(
        fully_shard(net),
        rename=[
            Rule("one.weight", "q"),
            Rule(["one.bias", "three.bias"], "joined"),
            Rule("two.weight", ["left", "right"], dim=1),
            Rule("three.weight", "turned", transpose=(0, 1)),
        ],
        bucket_bytes=1,
    )
    expected = {
        "q": one,
        "left": two[:, :3],
        "right": two[:, 3:],
        "two.bias": biases[1],
        "turned": three.T,
        "joined": torch.cat([biases[0], biases[2]]),
    }
    metas = {meta.name: meta for meta in source.metadata}
    assert list(metas) == list(expected)
    assert_equal_state(dict(source.iter_full()), expected)
    rank = dist.get_rank()
    pieces = {name: piece(value, metas[name], rank) for name, value in expected.items()}
    assert_equal_state(dict(source.iter_local()), pieces)
    cut = {name for name, value in expected.items() if pieces[name].shape != value.shape}
    assert cut == {"q", "two.bias"}
    assert all(metas[name].shape == value.shape for name, value in expected.items())


def test_a_plain_model_without_ranks_is_owned_by_every_rank() -> None:
    net = build()
    source = weight_source(net)
    assert [(m.name, m.owners, m.placements) for m in source.metadata] == [
        (name, None, None) for name in plain(net)
    ]
    assert_equal_state(dict(source.iter_full()), plain(net))
    assert_equal_state(dict(source.iter_local()), plain(net))
    elsewhere = weight_source(net, device="meta")
    assert {value.device.type for _, value in elsewhere.iter_full()} == {"meta"}


@distributed(4)
def test_a_model_on_some_ranks_is_owned_by_those() -> None:
    mesh = cpu_mesh((2, 2), ("pipeline", "shards"))["shards"]
    pairs = [new_group(ranks) if dist.get_rank() in ranks else None for ranks in ([0, 1], [2, 3])]
    mine = dist.get_rank() // 2
    net = sharded(build(), mesh=mesh)
    net.own = nn.Parameter(torch.ones(2))
    source = weight_source(net, group=pairs[mine])
    owners = {meta.owners for meta in source.metadata}
    assert owners == {(2 * mine, 2 * mine + 1)}
    assert_equal_state(dict(source.iter_full()), {"own": torch.ones(2)} | plain(build()))


@distributed(2)
def test_parameters_that_were_replaced_are_those_that_are_sent() -> None:
    net = build()
    source = weight_source(net)
    net.head.weight = nn.Parameter(net.head.weight.detach() + 1)
    assert_equal_state(dict(source.iter_full()), plain(net))
    assert_equal_state(dict(source.iter_local()), plain(net))


# -- errors ---------------------------------------------------------------------------------------


@distributed(4)
def test_a_parameter_whose_other_ranks_are_not_known_is_an_error_on_all() -> None:
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[0], mesh=mesh["dp"])
    fully_shard(net[1], mesh=mesh["tp"])
    with pytest.raises(ValueError, match=r"0\.weight is on ranks .* slicing one named mesh"):
        weight_source(net)


@distributed(2)
def test_wrong_calls_are_errors_that_say_what_to_do() -> None:
    net: Any = fully_shard(build())
    for arguments, error, text in (
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes"),
        ({"dtype": torch.int8}, TypeError, "floating-point"),
        ({"to": 0}, TypeError, "list of global ranks"),
        ({"to": [2]}, ValueError, "model is on ranks"),
        ({"rename": 3}, TypeError, "rename"),
        ({"rename": lambda name: "same"}, WeightsError, "produced twice"),
    ):
        with pytest.raises(error, match=text):
            weight_source(net, **arguments)
    with pytest.raises(TypeError, match=r"pass an nn\.Module"):
        weight_source(list(net.parameters()))  # type: ignore[arg-type]  # wrong on purpose
    source = weight_source(net)
    with unsharded(net):
        with pytest.raises(RuntimeError, match="call it outside of the block"):
            source.iter_full()
        with pytest.raises(RuntimeError, match=r"iter_local\(\) was called inside an unsharded"):
            source.iter_local()
    summed = nn.Module()
    addend = DTensor.from_local(torch.ones(3), cpu_mesh((2,), ("dp",)), [Partial()])
    summed.weight = nn.Parameter(addend)
    with pytest.raises(WeightsError, match="a sum that is not added up yet"):
        weight_source(summed)


@distributed(2)
def test_a_model_that_got_other_parameters_needs_a_new_source() -> None:
    net: Any = fully_shard(build())
    for size in (3, 4):  # added; with another shape
        source = weight_source(net)
        net.own = nn.Parameter(torch.ones(size))
        for call in (source.iter_full, source.iter_local, source.pin):
            with pytest.raises(ValueError, match="planned: own; make a new weight source"):
                call()


@distributed(2)
def test_ranks_that_name_other_receivers_all_raise() -> None:
    source = weight_source(sharded(build()), to=[dist.get_rank()])
    with pytest.raises(RankMismatchError, match=r"rank 1 has bucket_bytes=\d+, to=\[1\]"):
        list(source.iter_full())
