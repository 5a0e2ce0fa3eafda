"""Debug mode: collectives that ranks disagree on raise the same error on every rank."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import (
    CollectiveMismatchError,
    EventKind,
    EventLog,
    Layout,
    TensorSpec,
    all_gather_tensors,
    all_reduce_shards,
    check_collective,
    default_reduce_scatter,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
    observe,
    reduce_scatter_tensors,
    reduction_scaling,
)
from fullshard.comm.runtime.compat import default_store
from fullshard.comm.spi import CHECKS, LISTENERS, Launch
from fullshard.insight import debug_mode, set_debug_mode
from fullshard.insight.debugging import is_debugging, leave_collectives, resume_collectives
from fullshard.insight.desync import DesyncDetector
from support.collectives import gather_config, reduce_config
from support.ranks import RanksFailed, cpu_mesh, distributed, run_on_ranks, world
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads

AGES = 1000.0  # seconds; a test that waited so long would fail by pytest's timeout


def gather(name: str, rows: int = 4) -> torch.Tensor:
    """Ones, gathered from every rank."""
    group = world()
    layout = Layout([TensorSpec(shape=(rows,), dtype=torch.float32)], group.size())
    config = gather_config(group, name=name)
    shard = torch.ones(layout.specs[0].shard_shape(group.rank(), group.size()))
    output = torch.empty(rows)
    foreach_all_gather_copy_out(foreach_all_gather([shard], layout, config), [output])
    return output


def reduce(name: str, rows: int = 4, factor: float | None = None) -> torch.Tensor:
    """This rank's part of the mean of ones."""
    group = world()
    layout = Layout([TensorSpec(shape=(rows,), dtype=torch.float32)], group.size())
    scaling = reduction_scaling(group.size(), torch.float32, averages=False, divide_factor=factor)
    config = reduce_config(group, default_reduce_scatter(group), scaling, name=name)
    return foreach_reduce([torch.ones(rows)], layout, config).wait().shards[0]


def report_of(call: Callable[[], object]) -> str:
    """What ``call`` raises; the same on all ranks, which go on after it."""
    with pytest.raises(CollectiveMismatchError) as caught:
        call()
    resume_collectives()
    reports: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reports, str(caught.value))
    assert set(reports) == {str(caught.value)}
    return reports[0]


# -- ranks that agree -----------------------------------------------------------------------------


@distributed(2, 4)
def test_ranks_that_agree_get_the_same_bits_with_debug_mode_and_without() -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradients = [torch.randn(shape, generator=generator) for shape in [(5, 3), (1,), (8, 2)]]
    specs = [TensorSpec(shape=tuple(each.shape), dtype=each.dtype) for each in gradients]
    results = []
    for debug in (False, True):
        set_debug_mode(debug)
        log = EventLog()
        with observe(log):
            shards = reduce_scatter_tensors(gradients, None, world())
            results.append((all_gather_tensors(shards, specs, world()), log.kinds()))
    set_debug_mode(False)
    (plain, plain_shardings), (debugged, kinds) = results
    assert kinds == plain_shardings
    assert all(torch.equal(*pair) for pair in zip(plain, debugged, strict=True))


def test_the_store_does_not_grow_with_collectives_or_contexts() -> None:
    def body(rank: ThreadRank) -> list[int]:
        sizes = []
        for _ in range(3):
            with debug_mode(timeout=AGES):
                for name in ("a", "b", "c"):
                    gather(name)
                    reduce(name)
            rank.group.barrier().wait()
            sizes.append(default_store().num_keys())
            rank.group.barrier().wait()
        return sizes

    for sizes in run_program_on_threads(body, 4):
        assert len(set(sizes)) == 1


@distributed(2)
def test_a_process_group_of_one_rank_has_nobody_to_meet() -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    assert isinstance(group, dist.ProcessGroup)
    with debug_mode(timeout=AGES):
        check_collective(EventKind.ALL_GATHER, f"of rank {dist.get_rank()}", group, nbytes=8)
    for each in groups:
        if each is group:
            dist.destroy_process_group(each)


def test_ranks_that_are_threads_are_told_apart() -> None:
    def body(rank: ThreadRank) -> str:
        if rank.rank == 3:
            assert not is_debugging()
        rank.group.barrier().wait()
        with debug_mode(timeout=AGES):
            gather("layers.0")
            report = report_of(lambda: gather(f"layers.{2 if rank.rank == 5 else 1}"))
            gather("layers.2")
        assert not is_debugging()
        return report

    (report,) = set(run_program_on_threads(body, 8))
    assert "ranks 0-4, 6-7 gather layers.1, rank 5 gathers layers.2." in report


def test_debug_mode_of_one_thread_is_not_that_of_another_rank() -> None:
    def body(rank: ThreadRank) -> None:
        if rank.rank == 0:
            set_debug_mode(True)
        rank.group.barrier().wait()
        assert is_debugging() == (rank.rank == 0)
        rank.group.barrier().wait()

    run_program_on_threads(body, 2)
    gc.collect()
    assert not is_debugging()
    assert not CHECKS and not LISTENERS  # the world that was debugged is gone


# -- ranks that do not ----------------------------------------------------------------------------


@distributed(2, 4)
def test_another_tensor_another_collective_and_another_order_are_told_by_name() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    number = dist.get_world_size() - 1
    others = "rank 0" if number == 1 else f"ranks 0-{number - 1}"
    verb = "s" if number == 1 else ""
    with debug_mode(timeout=AGES):
        gather("layers.16")
        report = report_of(lambda: gather("layers.17") if not last else reduce("layers.18"))
        assert f"{others} gather{verb} layers.17, rank {number} reduces layers.18." in report
        report = report_of(lambda: [gather(name) for name in ("ab" if last else "ba")])
        assert f"{others} gather{verb} b, rank {number} gathers a." in report
        assert torch.equal(gather("layers.18"), torch.ones(4))


@distributed(2)
def test_sizes_dtypes_and_scalings_are_told_where_names_are_equal() -> None:
    rank = dist.get_rank()
    with debug_mode(timeout=AGES):
        report = report_of(lambda: gather("a", rows=4 + 8 * rank))
        assert (
            "rank 0 gathers a (32 bytes, float32), rank 1 gathers a (64 bytes, float32)" in report
        )
        report = report_of(lambda: reduce("a", factor=2.0 + rank))
        assert (
            "rank 0 reduces a (32 bytes, float32, sum scaled by 1 before and 0.5 after)" in report
        )
        assert "0.333333 after" in report


@distributed(4)
def test_an_all_reduce_over_replicas_is_compared_with_the_replicas_alone() -> None:
    mesh = cpu_mesh((2, 2), ("replicate", "shard"))
    scaling = reduction_scaling(4, torch.float32, averages=False)
    summing = reduction_scaling(4, torch.float32, averages=False, divide_factor=1.0)
    shards = mesh.get_group("shard")
    reduction = reduce_config(shards, default_reduce_scatter(shards), summing)
    layout = Layout([TensorSpec(shape=(4,), dtype=torch.float32)], 2)

    def all_reduce(name: str) -> torch.Tensor:
        sharded = foreach_reduce([torch.ones(4)], layout, replace(reduction, name=name))
        return all_reduce_shards(sharded, mesh.get_group("replicate"), scaling).wait().shards[0]

    rank = dist.get_rank()
    with debug_mode(timeout=AGES):
        assert torch.equal(all_reduce("layer"), torch.ones(2))
        with pytest.raises(CollectiveMismatchError) as caught:
            all_reduce("layer" if rank < 2 else "other")
        resume_collectives()
    # Whoever comes second may find the alarm of the other replicas.
    assert any(
        f"rank {a} all-reduces layer, rank {b} all-reduces other" in str(caught.value)
        for a, b in ((0, 2), (1, 3))
    )


@distributed(2, 4)
def test_a_rank_that_does_not_come_is_told_with_its_last_collective() -> None:
    number = dist.get_world_size() - 1
    with debug_mode(timeout=0.5):
        gather("layers.16")
        if dist.get_rank() != number:
            with pytest.raises(CollectiveMismatchError) as caught:
                gather("layers.17")
            report = str(caught.value)
            assert f"but rank {number} did not come within 0.5 s: " in report
            assert f"rank {number} last gathered layers.16, with rank" in report
            resume_collectives()
        dist.barrier()
        if dist.get_rank() == number:  # it comes too late, and hears the same
            with pytest.raises(CollectiveMismatchError, match="did not come within"):
                gather("layers.17")
            resume_collectives()
        gather("layers.18")


@distributed(2, fresh=True)
def test_a_rank_that_never_was_in_debug_mode_is_told_so() -> None:
    if dist.get_rank() == 0:
        with debug_mode(timeout=0.2), pytest.raises(CollectiveMismatchError) as caught:
            gather("a")
        assert "rank 1 has not come to any collective in debug mode" in str(caught.value)
    dist.barrier()


@distributed(4)
def test_ranks_that_wait_for_one_another_in_different_groups_are_told_apart() -> None:
    mesh = cpu_mesh((2, 2), ("replicate", "shard"))
    rank = dist.get_rank()
    axes = ("shard", "replicate") if rank in (0, 3) else ("replicate", "shard")
    with debug_mode(timeout=0.5), pytest.raises(CollectiveMismatchError) as caught:
        for axis in axes:
            check_collective(EventKind.ALL_REDUCE, axis, mesh.get_group(axis), nbytes=4)
    assert "waits for rank" in str(caught.value)


def _rank_1_ends(how: Callable[[], None]) -> None:
    with debug_mode(timeout=AGES):
        gather("layers.16")
        if dist.get_rank() == 1:
            how()
        gather("layers.17")


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _ended() -> None:
    atexit._run_exitfuncs()  # what the interpreter does at the end of a program
    os._exit(3)


@pytest.mark.parametrize(
    ("how", "words"), [(_killed, "has ended, after"), (_ended, "has ended its program, after")]
)
def test_a_rank_that_has_ended_is_told_long_before_the_timeout(
    how: Callable[[], None], words: str
) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_rank_1_ends, 2, how, fresh=True)
    wanted = f"rank 1 {words} its last collective: gathered layers.16. Meanwhile rank 0 gathers"
    assert wanted in caught.value.reports[0].text


@distributed(2)
def test_a_rank_that_gives_up_is_told_at_once_and_all_go_on() -> None:
    rank = dist.get_rank()
    with debug_mode(timeout=AGES):
        gather("layers.16")
        if rank == 1:
            leave_collectives(ValueError("no such token\nsecond line"))
            leave_collectives(ValueError("once is enough"))
        else:
            with pytest.raises(CollectiveMismatchError) as caught:
                gather("layers.17")
            wanted = (
                "rank 1 raised ValueError: no such token, after its last collective: gathered "
                "layers.16. Meanwhile rank 0 gathers layers.17"
            )
            assert wanted in str(caught.value)
            resume_collectives()
        gather("layers.18")


@distributed(2)
def test_an_exception_that_leaves_the_context_is_told_at_once() -> None:
    with (
        pytest.raises((ArithmeticError, CollectiveMismatchError)) as caught,
        debug_mode(timeout=AGES),
        debug_mode(timeout=AGES),
    ):
        if dist.get_rank() == 0:
            raise ArithmeticError
        gather("a")
    if dist.get_rank() == 1:
        assert (
            "rank 0 raised ArithmeticError, before its first collective. Meanwhile rank 1 gat"
            in (str(caught.value))
        )
    with debug_mode(timeout=AGES):  # a context begins anew
        gather("b")


@distributed(4)
def test_every_rank_hears_of_a_mismatch_among_some() -> None:
    mesh = cpu_mesh((2, 2), ("replicate", "shard"))
    rank = dist.get_rank()
    with debug_mode(timeout=AGES), pytest.raises(CollectiveMismatchError) as caught:
        name = f"of rank {rank}" if rank < 2 else "equal"
        check_collective(EventKind.ALL_GATHER, name, mesh.get_group("shard"), nbytes=4)
        check_collective(EventKind.ALL_REDUCE, "equal", mesh.get_group("replicate"), nbytes=4)
    assert "rank 0 gathers of rank 0, rank 1 gathers of rank 1." in str(caught.value)


@distributed(2)
def test_until_a_rank_resumes_even_equal_collectives_raise() -> None:
    with debug_mode(timeout=AGES):
        names = ("a", "c", "c") if dist.get_rank() == 0 else ("b", "c")  # 0 tries once more
        for name in names:
            with pytest.raises(CollectiveMismatchError, match="rank 0 gathers a, rank 1 gathers b"):
                gather(name)
        resume_collectives()
        gather("d")
        resume_collectives()  # nothing to resume from
        gather("e")


@distributed(2)
def test_a_store_that_is_gone_is_told_with_what_this_rank_was_doing() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    desync_detector = DesyncDetector(client, dist.get_rank(), dist.get_world_size())
    del server
    call = Launch(kind=EventKind.ALL_GATHER, name="layers.3", nbytes=4, detail="")
    for _ in range(2):
        with pytest.raises(CollectiveMismatchError, match=r"gathers layers\.3, but cannot ask"):
            desync_detector.meet(call, world(), AGES)


@distributed(2)
def test_a_second_world_in_the_same_store_finds_nothing_of_the_first() -> None:
    call = Launch(kind=EventKind.ALL_GATHER, name="a", nbytes=4, detail="")
    store = dist.PrefixStore("second world", default_store())
    for _ in range(2):
        desync_detector = DesyncDetector(store, dist.get_rank(), dist.get_world_size())
        dist.barrier()
        desync_detector.meet(call, world(), AGES)
        if dist.get_rank() == 0:
            desync_detector.depart("ended")
        dist.barrier()


# -- turning it on and off ------------------------------------------------------------------------


def test_debug_mode_that_is_off_looks_at_nothing_and_makes_nothing() -> None:
    assert not is_debugging()
    group = mock.Mock(spec=[])  # has no attribute that could be looked at
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(1000):
            check_collective(EventKind.ALL_GATHER, "a", group, nbytes=1)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000  # less than a byte for each call
    leave_collectives()
    resume_collectives()


@distributed(2)
def test_contexts_nest_and_the_whole_rank_may_be_debugged() -> None:
    with debug_mode(timeout=AGES):
        with debug_mode(timeout=0.2):
            for rank in (0, 1):
                if dist.get_rank() == rank:
                    with pytest.raises(CollectiveMismatchError, match=r"within 0\.2 s"):
                        gather("a")
                dist.barrier()
        resume_collectives()
        gather("a")
        assert is_debugging()
    assert not is_debugging()
    set_debug_mode(False)
    set_debug_mode(True, timeout=AGES)
    with debug_mode():
        gather("b")
    assert is_debugging()
    report_of(lambda: gather(f"of rank {dist.get_rank()}"))
    set_debug_mode(False)
    assert not is_debugging()
    gather(f"of rank {dist.get_rank()}")  # nobody looks


@distributed(2)
def test_arguments_are_checked() -> None:
    for timeout in (0.0, -1.0, float("inf"), float("nan")):
        with (
            pytest.raises(ValueError, match="finite number of seconds"),
            debug_mode(timeout=timeout),
        ):
            pass
    for wrong in ("1", True, None):
        with pytest.raises(TypeError, match="pass seconds as a number"):
            set_debug_mode(True, timeout=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass True or False"):
        set_debug_mode(1)  # type: ignore[arg-type]
    assert not is_debugging()
    stranger = mock.Mock(**{"size.return_value": 2})
    with debug_mode(), pytest.raises(ValueError, match="does not know; make it with"):
        check_collective(EventKind.ALL_GATHER, "a", stranger, nbytes=1)


def test_it_cannot_be_on_before_there_are_ranks() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        set_debug_mode(True)
