"""Slices of a model in training for the workers of an engine, against those of its whole values."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checkpoint.layouts import Full, Taken, tensor_parallel
from fullshard.checkpoint import (
    LinkError,
    Rule,
    Slice,
    SliceReceiver,
    SliceSender,
    connect_engine,
    tensor_parallel_slices,
    weight_source,
)
from fullshard.checkpoint.engines import links, slice_sender
from fullshard.sharding import RankMismatchError, fully_shard, unsharded
from support.engine.client import (
    LoopbackClient,
    connected,
    finish_slices,
    free_port,
    send_full,
)
from support.engine.model import CUTS, WORKERS, batch, build, cut
from support.engine.workers import work
from support.ranks import cpu_mesh, distributed, new_group
from support.surface.ranks import assert_equal_state, everyone, full_parameters
from support.surface.wrappings import adamw


def train(net: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        net(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trainer(net: Any, mesh: Any) -> Any:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def as_workers_have(whole: Full, dtype: torch.dtype | None) -> list[Full]:
    """What each worker has of a model's whole values."""
    cast = {name: value if dtype is None else value.to(dtype) for name, value in whole.items()}
    return [cut(cast, worker) for worker in range(WORKERS)]


def nbytes(values: Full) -> int:
    return sum(value.nbytes for value in values.values())


# Ranks 0 and 1 of the pool train. Ranks 2 and 3 are the workers: they have no model, and meet the
# others by a link of their own.
def with_workers(program: Callable[[LoopbackClient | None, Any, Any], None]) -> None:
    rank = dist.get_rank()
    mesh = cpu_mesh((2, 2), ("role", "shards"))["shards"]
    group = new_group([0, 1] if rank < 2 else [2, 3])
    folder = tempfile.mkdtemp() if rank == 0 else ""
    address = f"{everyone(folder)[0]}/engine"
    client = LoopbackClient(address, WORKERS, start=False) if rank == 0 else None
    dist.barrier()  # it listens
    if rank >= 2:
        work(address, rank - 2)
    else:
        with client or nullcontext():
            program(client, mesh, group)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


def wanted_by_workers(net: Any, **arguments: Any) -> list[Any]:
    return list(tensor_parallel_slices(weight_source(net, **arguments).metadata, CUTS, WORKERS))


class Wire:
    """Counts the bytes of weights in the messages of this rank to consumers."""

    def __init__(self) -> None:
        self.sent = 0

    def __call__(self, link: Any, message: torch.Tensor, to: int, tag: int) -> None:
        self.sent += message.nbytes
        links.send(link, message, to, tag)


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("bucket_bytes", [10**6, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.cross
@distributed(4)
def test_workers_have_their_slices_of_the_moment_and_no_other_byte_was_sent(
    dtype: torch.dtype, bucket_bytes: int
) -> None:
    def program(client: LoopbackClient | None, mesh: Any, group: Any) -> None:
        net = trainer(build(), mesh)
        optimizer = adamw(net.parameters())
        wanted = wanted_by_workers(net, group=group)
        sender = SliceSender(net, wanted, dtype=dtype, bucket_bytes=bucket_bytes, group=group)
        link = connected(client, group, WORKERS, sender)
        assert link is not None
        for round_ in range(2):
            train(net, optimizer, range(3 * round_, 3 * round_ + 1))
            moment = full_parameters(net)
            wire = Wire()
            with patch.object(slice_sender, "send", wire):
                transfer = sender.send(link)
                train(net, optimizer, range(3 * round_ + 1, 3 * round_ + 3))
                finish_slices(client, transfer)
            expected = as_workers_have(moment, dtype)
            needed = [nbytes(each) for each in expected]
            sums = torch.tensor([wire.sent, *transfer.sent])
            dist.all_reduce(sums, group=group)
            assert sums.tolist() == [sum(needed), *needed]
            assert sender.bytes_wanted == tuple(needed)
            assert not torch.equal(moment["head.weight"], full_parameters(net)["head.weight"])
            for worker, mine in enumerate(expected) if client else ():
                assert client is not None
                weights, version, received = client.state(worker)
                assert (version, received) == ("slices", needed[worker])
                assert_equal_state(weights, mine)

    with_workers(program)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@distributed(4)
def test_workers_that_take_whole_tensors_have_those_of_the_moment(dtype: torch.dtype) -> None:
    def program(client: LoopbackClient | None, mesh: Any, group: Any) -> None:
        net = trainer(build(), mesh)
        optimizer = adamw(net.parameters())
        source = weight_source(net, dtype=dtype, to=[0], group=group, bucket_bytes=200)
        link = connected(client, group, WORKERS, None)
        train(net, optimizer, range(1))
        moment = full_parameters(net)
        source.pin()
        engine = threading.Thread(target=send_full, args=(client, source, link))
        engine.start()
        train(net, optimizer, range(1, 4))
        engine.join()
        whole = {name: value.to(dtype) for name, value in moment.items()}
        for worker in range(WORKERS) if client else ():
            assert client is not None
            weights, version, received = client.state(worker)
            assert (version, received) == ("full", nbytes(whole))
            assert_equal_state(weights, whole)

    with_workers(program)


@pytest.mark.matrix
@distributed(2)
def test_workers_may_be_processes_without_a_process_group_of_torch() -> None:
    net = trainer(build(), None)
    sender = SliceSender(net, wanted_by_workers(net))
    rank = dist.get_rank()
    with tempfile.TemporaryDirectory() as folder:
        client = LoopbackClient(f"{folder}/engine", WORKERS, start=True) if rank == 0 else None
        with client or nullcontext():
            group = dist.group.WORLD
            assert group is not None
            link = connected(client, group, WORKERS, sender)
            assert link is not None
            finish_slices(client, sender.send(link))
            expected = as_workers_have(full_parameters(net), None)
            for worker, mine in enumerate(expected) if client else ():
                assert client is not None
                assert_equal_state(client.state(worker)[0], mine)


@distributed(4)
def test_a_request_in_the_wrong_order_is_an_error_and_changes_nothing() -> None:
    def program(client: LoopbackClient | None, mesh: Any, group: Any) -> None:
        net = trainer(build(), mesh)
        sender = SliceSender(net, wanted_by_workers(net, group=group), group=group)
        if client is not None:
            for request in (
                client.start_weight_update,
                client.finish_weight_update,
                lambda: client.update_weights({}),
            ):
                with pytest.raises(RuntimeError, match="while it is 'new'"):
                    request()
        link = connected(client, group, WORKERS, sender)
        assert link is not None
        if client is not None:
            with pytest.raises(RuntimeError, match="'update' while it is 'ready'"):
                client.update_weights({})
        finish_slices(client, sender.send(link))
        if client is not None:
            with pytest.raises(RuntimeError, match="'finish' while it is 'ready'"):
                client.finish_weight_update()
            assert client.state(0)[1] == "slices"

    with_workers(program)


# -- any layout -----------------------------------------------------------------------------------


def exchanged(sender: SliceSender, consumers: int) -> tuple[list[Full], torch.Tensor]:
    """What consumers, threads of rank 0, get, and the bytes that all ranks sent to each."""
    rank, size, port = dist.get_rank(), dist.get_world_size(), everyone(free_port())[0]
    found: list[Full] = [{} for _ in range(consumers)]

    def link(at: int) -> dist.ProcessGroup:
        return connect_engine("127.0.0.1", port, rank=at, size=size + consumers, timeout=60)

    def consume(number: int) -> None:
        found[number].update(SliceReceiver(sender.init_info(), link(size + number)))

    threads = [
        threading.Thread(target=consume, args=(number,))
        for number in (range(consumers) if rank == 0 else ())
    ]
    for thread in threads:
        thread.start()
    transfer = sender.send(link(rank))
    transfer.wait()
    for thread in threads:
        thread.join()
    sums = torch.tensor(transfer.sent)
    dist.all_reduce(sums)
    return found, sums


def _hybrid() -> tuple[Any, Full]:
    mesh = cpu_mesh((2, 2), ("replicas", "shards"))
    return trainer(build(), mesh), dict(build().named_parameters())


LAYOUTS: dict[str, Callable[[], tuple[Any, Full]]] = {
    "tensor parallel": partial(tensor_parallel, 7),
    "hybrid": _hybrid,
    "whole": lambda: (build(), dict(build().named_parameters())),
}


@pytest.mark.parametrize("case", LAYOUTS)
@distributed(4)
def test_slices_of_any_layout_are_those_of_the_whole_tensor(case: str) -> None:
    model, expected = LAYOUTS[case]()
    everything: dict[str, Any] = dict.fromkeys(expected, ())
    some: dict[str, Any] = {}
    values: Full = {}
    for name, value in expected.items():
        if value.ndim == 2:  # a box that fits no shard, and an empty one
            rows, columns = value.shape
            some[name] = [Slice(1, 1, columns - 1), Slice(0, 1, rows)]
            values[name] = value[1:, 1:-1]
        else:
            some[name] = Slice(0, 2, 2)
            values[name] = value[2:2]
    values = {name: value for name, value in values.items() if value.numel()} | {
        name: value for name, value in values.items() if not value.numel()
    }  # those without elements come last
    found, sums = exchanged(SliceSender(model, [everything, some], bucket_bytes=100), 2)
    if dist.get_rank() == 0:
        assert_equal_state(found[0], expected)
        assert_equal_state(found[1], values)
    assert sums.tolist() == [nbytes(expected), nbytes(values)]


@distributed(2)
def test_slices_of_renamed_tensors_are_cut_from_what_they_are_made_of() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    first, second = (layer.weight.detach().clone() for layer in net)
    biases = torch.cat([layer.bias.detach().clone() for layer in net])
    rules = [
        Rule("0.weight", ["left", "right"], dim=1),
        Rule("1.weight", "turned", transpose=(0, 1)),
        Rule(["0.bias", "1.bias"], "joined"),
    ]
    wanted = {
        "left": Slice(0, 1, 4),
        "right": Slice(1, 2, 3),
        "turned": Slice(0, 1, 3),
        "joined": Slice(0, 3, 7),
    }
    sender = SliceSender(fully_shard(net), [wanted], rename=rules, dtype=torch.bfloat16)
    found, sums = exchanged(sender, 1)
    expected = {
        "left": first[1:, :3],
        "right": first[:, 5:],
        "turned": second.T[1:3],
        "joined": biases[3:7],
    }
    expected = {name: value.bfloat16() for name, value in expected.items()}
    if dist.get_rank() == 0:
        assert_equal_state(found[0], expected)
    assert sums.tolist() == [nbytes(expected)]


@distributed(2)
def test_no_rank_has_a_whole_tensor_and_memory_is_shards_and_a_message_for_each_consumer() -> None:
    count, whole = 12, 64 * 64 * 4
    model = fully_shard(nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(count)]))
    names = [name for name, _ in model.named_parameters()]
    wanted = [{name: Slice(1, 32 * at, 32 * at + 32) for name in names} for at in range(2)]
    memory = Taken()
    with patch.object(slice_sender, "memory", memory):
        _, sums = exchanged(SliceSender(model, wanted, bucket_bytes=1), 2)
    assert memory.largest <= whole // 2  # a shard
    assert memory.peak <= count * whole // 2 + 2 * whole // 4
    assert sums.tolist() == [count * whole // 2] * 2


# -- errors ---------------------------------------------------------------------------------------


WRONG: list[tuple[Any, type[Exception], str]] = [
    ([{"haed.weight": ()}], ValueError, "consumer 0 wants 'haed.weight'.*mean 'head.weight'"),
    ([{}, {"head.weight": Slice(2, 0, 1)}], ValueError, "consumer 1 .* allowed are dims 0 to 1"),
    ([{"head.weight": Slice(0, 3, 8)}], ValueError, r"in dim 0 are 0 <= start <= stop <= 7"),
    ([{"head.weight": [Slice(0, 0, 1)] * 2}], ValueError, "each once"),
    ([{"head.weight": Slice(0, 0, 1.5)}], TypeError, "pass integers"),  # type: ignore[arg-type]
    ([{"head.weight": (0, 1, 2)}], TypeError, r"pass a fullshard\.checkpoint\.Slice"),
    ({"head.weight": ()}, TypeError, "a dict for each consumer"),
    ([["head.weight"]], TypeError, "consumer 0 wants a list"),
]


@distributed(2)
def test_wrong_slices_are_errors_on_every_rank_before_anything_is_sent() -> None:
    net, rank = trainer(build(), None), dist.get_rank()
    for wanted, error, text in WRONG:
        with pytest.raises(error, match=text):
            SliceSender(net, wanted)
    right: list[Any] = [{"head.weight": Slice(0, 0, 3)}]
    alone: Any = right if rank == 0 else WRONG[0][0]
    with pytest.raises(RankMismatchError if rank == 0 else ValueError, match=r"haed\.weight"):
        SliceSender(net, alone)
    other: Any = [{"head.weight": Slice(0, 0, 3 + rank)}]
    with pytest.raises(RankMismatchError, match=r"rank 1 has head\.weight: .* to \(4, 8\)"):
        SliceSender(net, other)


@distributed(2)
def test_a_send_that_one_rank_refuses_raises_on_all() -> None:
    net, rank, size = trainer(build(), None), dist.get_rank(), dist.get_world_size()
    sender = SliceSender(net, [{"head.weight": ()}])
    port = everyone(free_port())[0]
    link = connect_engine("127.0.0.1", port, rank=1 - rank, size=size, is_server=rank == 1)
    with pytest.raises(ValueError, match=r"link has 2 processes .* and 1 consumers"):
        sender.send(link)
    with unsharded(net), pytest.raises(RuntimeError, match=r"send\(\) was called inside"):
        sender.send(link)
    with pytest.raises(ValueError, match="from 0 to 1"):
        connect_engine("127.0.0.1", port, rank=2, size=2)


@distributed(2)
def test_patterns_that_cut_nothing_or_unequally_are_errors() -> None:
    metadata = weight_source(trainer(build(), None)).metadata
    with pytest.raises(ValueError, match=r"head\.weight has shape \(7, 8\), of which dim 0 cannot"):
        tensor_parallel_slices(metadata, {"head.*": 0}, 2)
    with pytest.raises(ValueError, match=r"patterns \*\.gate\.weight fit no tensor"):
        tensor_parallel_slices(metadata, {"*.gate.weight": 0}, 2)


@distributed(4)
def test_a_worker_that_stops_is_named_on_every_rank_and_the_other_gets_all() -> None:
    def program(client: LoopbackClient | None, mesh: Any, group: Any) -> None:
        net = trainer(build(), mesh)
        wanted = wanted_by_workers(net, group=group)
        sender = SliceSender(net, wanted, bucket_bytes=1, group=group)
        link = connected(client, group, WORKERS, sender)
        assert link is not None
        transfer = sender.send(link)
        with pytest.raises((LinkError, RankMismatchError), match="consumer 1 does not have all"):
            finish_slices(client, transfer, stop=[1, "blocks.0.up.weight"])
        expected = [nbytes(each) for each in as_workers_have(full_parameters(net), None)]
        sums = torch.tensor(transfer.sent)
        dist.all_reduce(sums, group=group)
        assert sums[0] == expected[0]
        assert sums[1] < expected[1]
        if client is not None:
            assert client.state(0)[1] is None  # the update was not finished

    with_workers(program)


@pytest.mark.matrix
@distributed(2, fresh=True)
def test_a_worker_that_is_lost_is_named_on_every_rank() -> None:
    net, rank = trainer(build(), None), dist.get_rank()
    sender = SliceSender(net, wanted_by_workers(net), bucket_bytes=1)
    with tempfile.TemporaryDirectory() as folder:
        client = LoopbackClient(f"{folder}/engine", WORKERS, start=True) if rank == 0 else None
        group = dist.group.WORLD
        assert group is not None
        with client or nullcontext():
            link = connected(client, group, WORKERS, sender)
            assert link is not None
            transfer = sender.send(link)
            with pytest.raises((LinkError, RankMismatchError), match="consumer 1 does not have"):
                finish_slices(client, transfer, die=[1, "blocks.0.up.weight"])


@distributed(2)
def test_a_rank_that_cannot_send_is_named_by_the_consumer_and_on_every_rank() -> None:
    net, rank = trainer(build(), None), dist.get_rank()
    sender = SliceSender(net, [{"head.weight": (), "head.bias": ()}], bucket_bytes=1)
    size, port = dist.get_world_size(), everyone(free_port())[0]
    told: list[str] = []

    def consume() -> None:
        link = connect_engine("127.0.0.1", port, rank=size, size=size + 1, timeout=60)
        try:
            dict(SliceReceiver(sender.init_info(), link))
        except LinkError as error:
            told.append(str(error))

    consumer = threading.Thread(target=consume)
    if rank == 0:
        consumer.start()
    link = connect_engine("127.0.0.1", port, rank=rank, size=size + 1, timeout=60)
    broken = patch.object(slice_sender._Copies, "message", side_effect=MemoryError("none left"))
    with broken if rank == 1 else nullcontext():
        transfer = sender.send(link)
        with pytest.raises((LinkError, RankMismatchError), match="MemoryError: none left"):
            transfer.wait()
    if rank == 0:
        consumer.join()
        assert told == [
            "trainer rank 1 could not send its part of the slices: MemoryError: none left"
        ]
