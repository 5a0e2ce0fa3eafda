"""Full parameters as a stream beside training, against the unsharded model's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from checkpoint.layouts import SECOND_CUTS, Taken, plain
from fullshard.checkpoint import iter_full
from fullshard.checkpoint.streaming import lanes, shards
from fullshard.checkpoint.streaming import stream as streams
from fullshard.sharding import RankMismatchError, fully_shard, unsharded
from support.python import environment
from support.ranks import RanksFailed, cpu_mesh, distributed, run_on_ranks
from support.surface.model import Net, build, sharded, train
from support.surface.ranks import assert_equal_state, everyone, full_parameters
from support.surface.wrappings import WRAPPINGS, adamw, hybrid

BUCKETS = [100, 1, 10**6]  # bytes: several parameters in some, one in each, all in one


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("wrapping", [*WRAPPINGS, "hybrid"])
@pytest.mark.cross
@distributed(2, 1, 3, 4)
def test_it_gives_the_unsharded_models_parameters_in_order(
    wrapping: str, bucket_bytes: int, world_size: int
) -> None:
    if wrapping == "hybrid" and world_size % 2:
        return
    net = hybrid(build()) if wrapping == "hybrid" else WRAPPINGS[wrapping](build())
    assert_equal_state(dict(iter_full(net, bucket_bytes=bucket_bytes)), plain(build()))


@pytest.mark.parametrize("layout", SECOND_CUTS)
@distributed(4)
def test_parameters_that_are_cut_twice_tied_or_not_sharded_are_whole(layout: str) -> None:
    model, expected = SECOND_CUTS[layout]()
    assert_equal_state(dict(iter_full(model, bucket_bytes=300)), expected)


@distributed(4)
def test_floating_parameters_are_cast_on_the_way_and_ranks_outside_get_nothing() -> None:
    net = sharded(build())
    found = dict(iter_full(net, dtype=torch.bfloat16, to=[1, 3], bucket_bytes=100))
    if dist.get_rank() in (1, 3):
        assert_equal_state(found, {k: v.bfloat16() for k, v in plain(build()).items()})
    else:
        assert found == {}


@distributed(2)
def test_every_parameter_is_of_the_step_before_which_it_was_called() -> None:
    net = sharded(build())
    optimizer = adamw(net.parameters())
    train(net, optimizer, range(1))
    expected = dict(iter_full(net))
    stream = iter_full(net, bucket_bytes=1)
    first = next(stream)
    train(net, optimizer, range(1, 3))
    assert_equal_state(dict([first, *stream]), expected)
    now = dict(iter_full(net))
    assert not torch.equal(now["stem.weight"], expected["stem.weight"])


# Ranks come to training and to the stream in different orders. Were they on one process group, or
# did one wait for the other, this would hang.
@distributed(4)
def test_ranks_may_train_and_consume_in_any_order() -> None:
    net, rank = sharded(build()), dist.get_rank()
    optimizer, expected = adamw(net.parameters()), plain(build())
    stream, found = iter_full(net, bucket_bytes=1), dict[str, torch.Tensor]()
    consumer = threading.Thread(target=lambda: found.update(stream))
    if rank == 0:  # in a thread of its own, while it trains
        consumer.start()
    if rank == 1:  # a parameter before each step
        for step in range(len(expected)):
            found.update([next(stream)])
            train(net, optimizer, [step])
    else:
        train(net, optimizer, range(len(expected)))
    if rank > 1:  # after all training
        found.update(stream)
    if rank == 0:
        consumer.join()
    found.update(stream)
    assert_equal_state(found, expected)


@distributed(2)
def test_streams_that_follow_each_other_keep_their_values_apart() -> None:
    net = sharded(build())
    optimizer, streams, expected = adamw(net.parameters()), [], []
    for step in range(3):
        streams.append(iter_full(net, bucket_bytes=1))
        expected.append(full_parameters(net))
        train(net, optimizer, [step])
    for stream, values in zip(streams, expected, strict=True):
        assert_equal_state(dict(stream), values)


@distributed(3)
def test_a_consumer_that_leaves_early_stops_nobody_else() -> None:
    net, rank = sharded(build()), dist.get_rank()
    stream = iter_full(net, bucket_bytes=1)
    found = []
    try:
        for name, _ in stream:
            found.append(name)
            if rank == 0:
                break
            if rank == 1 and len(found) == 3:
                raise ZeroDivisionError
    except ZeroDivisionError:
        stream.close()
    if rank == 0:
        del stream  # nobody holds it any more
    else:
        stream.wait()
    assert everyone(len(found)) == [1, 3, len(plain(build()))]
    train(net, adamw(net.parameters()), range(1))  # and training goes on


@distributed(2)
def test_a_stream_that_nobody_consumes_any_more_ends_on_all_ranks() -> None:
    net = sharded(build())
    made: list[int] = []
    bucket = lanes._bucket

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return bucket(*arguments)

    with patch.object(lanes, "_bucket", counted):
        with iter_full(net, bucket_bytes=1, to=[1]) as stream:
            for _ in stream:
                break
        stream.wait()
    most = 3  # the one that was consumed, one ahead, one on its way
    assert everyone(len(made))[0] == 0 < everyone(len(made))[1] <= most < len(plain(build()))


@pytest.mark.parametrize("to", [[0], None])
@distributed(2, 4, matrix=[4])
def test_memory_is_the_shards_and_three_buckets(to: list[int] | None, world_size: int) -> None:
    count, nbytes = 24, 128 * 128 * 4
    model = fully_shard(nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(count)]))
    own, bucket, memory = count * nbytes // world_size, 2 * nbytes, Taken()
    with patch.object(shards, "memory", memory), patch.object(lanes, "memory", memory):
        stream = iter_full(model, bucket_bytes=bucket, to=to)
        for _, full in stream:
            del full
        stream.wait()
    messages = len(to or range(world_size)) * bucket // world_size
    gets = to is None or dist.get_rank() in to
    assert own <= memory.peak <= own + messages + (3 if gets else 0) * bucket
    assert count * nbytes > 2 * (memory.peak - own)  # else this shows nothing


# -- errors ---------------------------------------------------------------------------------------


@distributed(3)
def test_a_rank_that_cannot_send_is_named_where_its_part_is_missed() -> None:
    net, rank = sharded(build()), dist.get_rank()
    calls: list[Any] = []
    message = shards.PinnedShards.message

    def short(self: Any, pieces: Any) -> torch.Tensor:
        calls.append(pieces)
        if rank == 1 and len(calls) == 3:
            raise MemoryError("none left")
        return message(self, pieces)

    with patch.object(shards.PinnedShards, "message", short):
        stream = iter_full(net, bucket_bytes=1, to=[0])
        if rank == 0:
            with pytest.raises(RankMismatchError, match="has ended, as rank 1: MemoryError: none"):
                list(stream)
        if rank < 2:
            with pytest.raises((MemoryError, RankMismatchError), match="none left"):
                stream.wait()
    assert len(dict(iter_full(net))) == len(plain(build()))  # the next one is none the worse


@distributed(2)
def test_a_rank_that_cannot_receive_raises_and_the_others_get_all() -> None:
    net, rank = sharded(build()), dist.get_rank()

    def short(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        if rank == 1 and tuple(shape) == (3, 6):
            raise MemoryError("none left")
        return torch.empty(shape, dtype=dtype)

    with patch.object(lanes, "memory", short):
        stream = iter_full(net, bucket_bytes=1)
        if rank == 1:
            with pytest.raises(MemoryError, match="none left"):
                list(stream)
        else:
            assert_equal_state(dict(stream), plain(build()))
    assert len(dict(iter_full(net))) == len(plain(build()))


@distributed(2)
def test_a_call_that_is_interrupted_on_one_rank_raises_on_all() -> None:
    net, rank = sharded(build()), dist.get_rank()
    interrupted = patch.object(streams, "PinnedShards", side_effect=KeyboardInterrupt)
    told = KeyboardInterrupt if rank == 1 else RankMismatchError
    with interrupted if rank == 1 else nullcontext(), pytest.raises(told):
        list(iter_full(net))
    assert len(dict(iter_full(net))) == len(plain(build()))


@distributed(2)
def test_ranks_that_disagree_all_raise() -> None:
    net, rank = sharded(build()), dist.get_rank()
    with pytest.raises(RankMismatchError, match=r"rank 1 has bucket_bytes=101, to=\[0, 1\]"):
        list(iter_full(net, bucket_bytes=100 + rank))
    wrong = [0, 2] if rank == 1 else [0, 1]
    told = ValueError if rank == 1 else RankMismatchError
    with pytest.raises(told, match=r"to=\[0, 2\], but the model is on ranks \[0, 1\]"):
        list(iter_full(net, to=wrong))
    assert len(dict(iter_full(net))) == len(plain(build()))


@distributed(2)
def test_wrong_calls_are_errors_that_say_what_to_do() -> None:
    net: Any = fully_shard(build())
    for arguments, text in (
        ({"bucket_bytes": 0}, "positive number of bytes"),
        ({"bucket_bytes": True}, "positive number of bytes"),
        ({"dtype": torch.int8}, "floating-point"),
        ({"to": 0}, "list of global ranks"),
    ):
        with pytest.raises(TypeError, match=text):
            iter_full(net, **arguments)
    with pytest.raises(TypeError, match=r"pass an nn\.Module"):
        iter_full(list(net.parameters()))  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="model is on ranks"):
        iter_full(net, to=[])
    with pytest.raises(ValueError, match=r"group has ranks"):
        iter_full(net, group=[dist.new_group([each]) for each in range(2)][dist.get_rank()])
    with unsharded(net), pytest.raises(RuntimeError, match="call it outside of the block"):
        iter_full(net)
    with torch.device("meta"):
        meta = fully_shard(Net())
    with pytest.raises(ValueError, match="meta device"):
        iter_full(meta)


@distributed(2)
def test_another_group_on_one_rank_is_an_error_on_all_and_none_waits() -> None:
    net, rank = sharded(build()), dist.get_rank()
    pairs = [dist.new_group([0, 1], backend="gloo") for _ in range(2)]
    alone = [dist.new_group([each]) for each in range(2)][1]
    for group in (pairs[0], None):
        told = ValueError if rank == 1 else RankMismatchError
        with pytest.raises(
            told, match=r"group has ranks \[1\], and the model is on ranks \[0, 1\]"
        ):
            iter_full(net, group=alone if rank == 1 else group)
    with pytest.raises(RankMismatchError, match=r"rank 0 has group=None; rank 1 has group \S+ of"):
        iter_full(net, group=pairs[0] if rank == 1 else None)
    with pytest.raises(RankMismatchError, match=r"rank 0 has group \S+ of ranks \[0, 1\]; rank 1"):
        iter_full(net, group=pairs[rank])
    assert len(dict(iter_full(net, group=pairs[0]))) == len(plain(build()))


@distributed(4)
def test_another_group_on_one_rank_of_a_hybrid_mesh_is_an_error_on_all() -> None:
    net, rank = hybrid(build()), dist.get_rank()
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][1]
    told = ValueError if rank == 2 else RankMismatchError
    with pytest.raises(told, match=r"group has ranks \[2, 3\]"):
        iter_full(net, group=pair if rank == 2 else None)


@distributed(2)
def test_addends_of_a_parameter_are_refused_by_name() -> None:
    net = nn.Module()
    addend = DTensor.from_local(torch.ones(3), cpu_mesh((2,), ("dp",)), [Partial()])
    net.weight = nn.Parameter(addend)
    with pytest.raises(ValueError, match=r"weight has placements \(Partial\(sum\),\).*redistribut"):
        iter_full(net)


@distributed(4)
def test_a_model_on_some_ranks_takes_a_group_of_theirs() -> None:
    mesh = cpu_mesh((2, 2), ("pipeline", "shards"))
    half = mesh["shards"]
    net = sharded(build(), mesh=half)
    with pytest.raises(ValueError, match="a gloo process group of those"):
        iter_full(net)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    assert_equal_state(dict(iter_full(net, group=mine)), plain(build()))


def test_a_plain_model_streams_without_ranks() -> None:
    assert_equal_state(dict(iter_full(build(), bucket_bytes=100)), plain(build()))
    stream = iter_full(build(), bucket_bytes=1)
    next(stream)
    stream.close()
    stream.wait()
    assert list(stream) == []


def test_a_stream_whose_consuming_thread_ended_ends() -> None:
    stream = iter_full(build(), bucket_bytes=1)
    taker = threading.Thread(target=lambda: next(stream))
    taker.start()
    taker.join()
    stream.wait()


def _lost() -> None:
    net = sharded(build())
    stream: Iterator[Any] = iter_full(net, bucket_bytes=1)
    for index, _ in enumerate(stream):
        if dist.get_rank() == 1 and index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 0 and index == 0:  # takes the rest once rank 1 is gone
            with pytest.raises(RuntimeError):
                dist.recv(torch.zeros(1), 1)


def test_a_rank_that_is_lost_is_an_error_on_the_others() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_lost, 2, fresh=True)
    assert caught.value.exit_codes == {1: -signal.SIGKILL}
    assert re.search(r"RuntimeError: .*onnection", caught.value.reports[0].text)


_PROGRAM = """
import sys
import torch.distributed as dist
from torch import nn
from fullshard.checkpoint import iter_full
from fullshard.sharding import fully_shard

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = fully_shard(nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)]))
count = 0
for name, full in iter_full(model, bucket_bytes=1):
    count += 1
    if rank == 0 and count == 2:
        raise ZeroDivisionError("the engine is gone")
print(count)
"""


@pytest.mark.matrix
def test_a_process_whose_consumer_raised_ends_and_the_others_get_all(tmp_path: Any) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(rank), str(tmp_path / "store")],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert "ZeroDivisionError: the engine is gone" in ended[0][1]
    assert ended[1] == ("16\n", "")
    assert [process.returncode for process in started] == [1, 0]
