"""The pool of rank processes that the distributed tests stand on."""

from __future__ import annotations

import gc
import inspect
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from support.pool import ranks as rank_pool
from support.pool.messages import Outcome
from support.pool.ranks import RankPool
from support.ranks import RanksFailed, cpu_mesh, distributed, run_on_ranks

SCALE = 10


def _scaled_rank() -> int:
    return SCALE * dist.get_rank()


class _Point:
    """A class of the test module: rank processes cannot import it."""

    def __init__(self, x: int) -> None:
        self.x = x


@distributed(2, 4)
def test_the_body_runs_on_every_rank_of_the_process_group(world_size: int) -> None:
    assert dist.get_world_size() == world_size
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == world_size


@pytest.mark.parametrize("value", [3, 5])
@distributed(world_size=2)
def test_parametrised_values_and_fixtures_arrive_on_the_ranks(value: int, tmp_path: Path) -> None:
    assert value in (3, 5)
    (tmp_path / str(dist.get_rank())).write_text(str(value))
    dist.barrier()
    assert [path.read_text() for path in tmp_path.iterdir()] == [str(value)] * 2


@distributed(2)
def test_a_rank_has_the_environment_of_torchrun_and_one_thread() -> None:
    assert os.environ["RANK"] == str(dist.get_rank())
    assert os.environ["WORLD_SIZE"] == "2"
    assert torch.get_num_threads() == 1


@distributed(4)
def test_a_cpu_mesh_covers_all_ranks_and_is_made_once() -> None:
    assert cpu_mesh().size() == 4
    assert cpu_mesh() is cpu_mesh()
    assert cpu_mesh((2, 2), ("replicate", "shard"))["shard"].size() == 2


def test_results_come_back_in_rank_order_and_use_the_test_modules_globals() -> None:
    assert run_on_ranks(_scaled_rank, 2) == [0, 10]


def test_instances_of_a_test_modules_class_travel_both_ways() -> None:
    def move(point: _Point) -> _Point:
        return _Point(point.x + dist.get_rank())

    results = run_on_ranks(move, 2, _Point(5))
    assert [result.x for result in results] == [5, 6]
    assert all(isinstance(result, _Point) for result in results)


def test_tensors_come_back_by_value() -> None:
    results = run_on_ranks(lambda: torch.full((3,), float(dist.get_rank())), 2)
    assert [result.tolist() for result in results] == [[0.0] * 3, [1.0] * 3]


def test_one_pool_serves_all_jobs_of_a_world_size() -> None:
    assert run_on_ranks(os.getpid, 2) == run_on_ranks(os.getpid, 2)


def test_every_job_starts_from_the_same_seed() -> None:
    first, second = (run_on_ranks(lambda: torch.rand(()).item(), 2) for _ in range(2))
    assert first == second


_CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "default device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "grad mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "threads": (lambda: torch.set_num_threads(2), torch.get_num_threads),
    "denormals": (
        lambda: torch.set_flush_denormal(True),
        lambda: torch.tensor(1e-40).mul(1).item(),
    ),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.get_deterministic_debug_mode,
    ),
    "uninitialised memory": (  # torch replaces that module by an object, which does not travel
        lambda: setattr(vars(torch.utils)["deterministic"], "fill_uninitialized_memory", False),
        lambda: vars(torch.utils)["deterministic"].fill_uninitialized_memory,
    ),
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "warnings": (lambda: torch.set_warn_always(True), torch.is_warn_always_enabled),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "autocast dtype": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "autocast cache": (
        lambda: torch.set_autocast_cache_enabled(False),
        torch.is_autocast_cache_enabled,
    ),
    "swapped parameters": (
        lambda: torch.__future__.set_swap_module_params_on_conversion(True),
        torch.__future__.get_swap_module_params_on_conversion,
    ),
    "seed of random": (random.random, random.random),
    "seed of numpy": (lambda: np.random.random(), lambda: np.random.random()),
    "environment": (
        lambda: os.environ.update(FULLSHARD_LEFT_BEHIND="1"),
        lambda: os.environ.get("FULLSHARD_LEFT_BEHIND"),
    ),
    "working directory": (lambda: os.chdir("/"), os.getcwd),
    "signals": (
        lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        lambda: str(signal.getsignal(signal.SIGTERM)),
    ),
    "garbage collection": (gc.disable, gc.isenabled),
}


@pytest.mark.parametrize("what", _CHANGES)
def test_what_a_job_changes_in_the_process_is_put_back(what: str) -> None:
    change, look = _CHANGES[what]
    before = run_on_ranks(look, 2)
    run_on_ranks(change, 2)
    assert run_on_ranks(look, 2) == before


def _drawn() -> str:
    drawn = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    return float(drawn.double().sum()).hex()


def test_a_process_that_cannot_read_its_processor_draws_what_ranks_and_pytest_draw() -> None:
    program = f"""
import resource, torch
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
{inspect.getsource(_drawn)}
print(_drawn())"""
    blind = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    assert [blind.stdout.decode().strip(), *run_on_ranks(_drawn, 2)] == [_drawn()] * 3


def test_a_warning_is_the_same_error_on_a_rank_as_in_pytest() -> None:
    def warn() -> None:
        warnings.warn("careful", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RanksFailed, match="UserWarning: careful"):
            run_on_ranks(warn, 2, fresh=True)


def test_a_rank_that_raises_is_shown_with_its_number_and_traceback() -> None:
    def fail_on_one() -> str:
        if dist.get_rank() == 1:
            print("last words")
            raise ValueError("no such shard")
        return "fine"

    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(fail_on_one, 2, fresh=True)
    message = str(caught.value)
    assert "rank 1: the function raised" in message
    assert "in fail_on_one" in message
    assert "ValueError: no such shard" in message
    assert "last words" in message
    assert "rank_process.py" not in message
    assert caught.value.results == {0: "fine"}


def test_a_failed_job_does_not_spoil_the_next_one() -> None:
    def fail() -> None:
        raise ValueError("once")

    before = run_on_ranks(os.getpid, 2)
    with pytest.raises(RanksFailed):
        run_on_ranks(fail, 2)
    after = run_on_ranks(os.getpid, 2)
    assert not set(before) & set(after)
    assert not any(_is_alive(pid) for pid in before)


def _fails_at_first(text: str, folder: Path) -> int:
    try:
        (folder / str(dist.get_rank())).touch(exist_ok=False)
    except FileExistsError:
        return 2
    if dist.get_rank() == 0:
        raise RuntimeError(text)
    return 1


def test_a_first_connection_that_gloo_lost_is_tried_once_more(tmp_path: Path) -> None:
    lost = "Gloo connectFullMesh failed with [...] Connection closed by peer"
    assert run_on_ranks(_fails_at_first, 2, lost, tmp_path) == [2, 2]
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(RanksFailed, match="another error"):
        run_on_ranks(_fails_at_first, 2, "another error", other)


def test_a_rank_left_alone_in_a_collective_is_named_with_its_stack_before_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_pool, "GRACE", 0.5)

    def diverge() -> None:
        if dist.get_rank() == 0:
            raise ValueError("not coming")
        dist.barrier()

    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(diverge, 2, fresh=True, job_timeout=250)
    message = str(caught.value)
    assert "ValueError: not coming" in message
    assert "rank 1: the rank was still busy when it was killed" in message
    assert "in barrier" in message
    assert "in diverge" in message


def test_a_job_past_its_timeout_is_killed_and_every_stack_is_shown() -> None:
    def linger() -> None:
        time.sleep(1000)

    with pytest.raises(RanksFailed, match="no answer within 1 s") as caught:
        run_on_ranks(linger, 2, fresh=True, job_timeout=1)
    assert str(caught.value).count("in linger") == 2


def test_a_rank_that_crashes_is_reported_with_its_signal_and_its_stack() -> None:
    def crash() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(RanksFailed, match=f"exit code -{signal.SIGSEGV}") as caught:
        run_on_ranks(crash, 2, fresh=True)
    assert caught.value.reports[1].outcome is Outcome.DIED
    assert caught.value.exit_codes == {1: -signal.SIGSEGV}
    assert "in crash" in str(caught.value)


def test_a_collective_that_one_rank_left_out_is_blamed_on_its_own_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_pool, "GRACE", 0.5)

    def one_too_many() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(()), async_op=True)

    with pytest.raises(RanksFailed, match="the barrier after"):
        run_on_ranks(one_too_many, 2, fresh=True)


def test_a_job_that_leaves_one_rank_in_a_group_more_fails() -> None:
    def lopsided() -> None:
        dist.new_group([1])

    with pytest.raises(RanksFailed, match=r"different numbers of process groups: \{0: 1, 1: 2\}"):
        run_on_ranks(lopsided, 2, fresh=True)


def test_dtensors_of_a_job_are_over_the_process_groups_of_its_own_meshes() -> None:
    def detached_has_its_own() -> bool:
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        detached: Any = sharded.detach()
        return detached.device_mesh.get_group() is mesh.get_group()

    assert run_on_ranks(detached_has_its_own, 2) == [True] * 2
    assert run_on_ranks(detached_has_its_own, 2) == [True] * 2


def test_an_argument_that_cannot_travel_is_named() -> None:
    def take(handle: object) -> None:
        del handle

    with pytest.raises(TypeError, match="handle: lock"):
        run_on_ranks(take, 2, handle=threading.Lock())


def test_a_skip_on_every_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_on_ranks(lambda: pytest.skip("not here"), 2)


def test_a_killed_pool_leaves_no_process() -> None:
    with RankPool(2) as pool:
        pids = pool.pids()
        assert all(_is_alive(pid) for pid in pids)
    assert not any(_is_alive(pid) for pid in pids)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
