"""Checkpoints written while training goes on: what they hold, and what a kill leaves."""

from __future__ import annotations

import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fullshard.checkpoint import PendingSave, SaveError, async_save
from fullshard.checkpoint.saving import writing
from fullshard.checkpoint.saving.writing import _commit
from fullshard.sharding import fully_shard
from support import tp_model
from support.pool.ranks import RanksFailed
from support.products import few
from support.python import run_python
from support.ranks import cpu_mesh, distributed, run_on_ranks
from support.surface.model import build, sharded, train
from support.surface.ranks import assert_equal_state, full_parameters
from support.surface.wrappings import adamw, hybrid

# reading in one process is what is wanted
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def capture(net: Any, optimizer: Any, step: int) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(net, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def restored(folder: Path, net: Any) -> int:
    """Loads into ``net`` by torch's own reader, and returns the step."""
    optimizer = adamw(net.parameters())
    train(net, optimizer, range(9, 10))  # other values
    state = capture(net, optimizer, -1)
    dcp.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(net, optimizer, **parts)
    step: int = state["step"]
    return step


@pytest.mark.device(paces=True)
@pytest.mark.parametrize("wrapping", ["blocks", "hybrid"])
@distributed(2, 4, matrix=(4,))
def test_torchs_reader_finds_what_was_there_at_the_call(wrapping: str, tmp_path: Path) -> None:
    wrap = sharded if wrapping == "blocks" else hybrid
    net = wrap(build())
    optimizer = adamw(net.parameters())
    train(net, optimizer, range(2))
    expected = full_parameters(net)
    pending = async_save(capture(net, optimizer, 2), tmp_path / "checkpoint")
    train(net, optimizer, range(2, 4))
    assert pending.result() == tmp_path / "checkpoint"
    dist.barrier()
    other = fully_shard(build(1))
    assert restored(tmp_path / "checkpoint", other) == 2
    assert_equal_state(full_parameters(other), expected)


@distributed(4)
def test_tensor_parallel_shards_are_saved_once_each(tmp_path: Path) -> None:
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    model = tp_model.parallelize(tp_model.build(7), mesh["tp"])
    tp_model.shard(model, fully_shard, mesh=mesh["dp"])
    async_save({"model": model.state_dict()}, tmp_path / "c").result()
    dist.barrier()
    plain = tp_model.build(7)
    state = {"model": {name: torch.zeros_like(v) for name, v in plain.state_dict().items()}}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert_equal_state(state["model"], dict(plain.state_dict()))


@distributed(2)
def test_a_save_over_another_leaves_its_own_files_alone(tmp_path: Path) -> None:
    net = sharded(build())
    optimizer = adamw(net.parameters())
    for step in range(3):
        train(net, optimizer, [step])
        pending = async_save(capture(net, optimizer, step), tmp_path / "c")
    pending.result()
    dist.barrier()
    assert sorted(path.name.split("_")[2] for path in (tmp_path / "c").glob("__*")) == ["0", "1"]
    assert restored(tmp_path / "c", fully_shard(build(1))) == 2


@distributed(3)
def test_entries_that_only_some_ranks_have_are_saved(tmp_path: Path) -> None:
    rank = dist.get_rank()
    state = {"all": torch.arange(3.0), f"rank {rank}": torch.full((2,), rank), "n": [rank, "x"]}
    async_save(state, tmp_path / "c").result()
    dist.barrier()
    names = [f"rank {each}" for each in range(3)]
    found: dict[str, Any] = {name: torch.zeros(2, dtype=torch.int64) for name in names}
    dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert [found[name].tolist() for name in names] == [[0, 0], [1, 1], [2, 2]]


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def _failed_on_rank_1(state: dict[str, Any], folder: Path) -> PendingSave:
    """A save that has failed, and whose result nobody has asked for."""
    full = patch.object(FileSystemWriter, "write_data", _full)
    with full if dist.get_rank() == 1 else nullcontext():
        pending = async_save(state, folder)
        wait([pending])
    return pending


@distributed(2)
def test_values_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    rank = dist.get_rank()
    alike = torch.tensor([0.0, -0.0, float("nan")])
    sharded = fully_shard(build()).state_dict()
    shards = {"head": {"exp_avg": torch.full((3,), float(rank))}, "step": torch.tensor(rank)}
    others: dict[str, Any] = {
        "alike": alike,
        "empty": alike[:0],
        "bool": alike > 1,
        "complex": alike + 1j,
    }
    others |= {"list": [1, "text", None, float("nan")], "loader": {"epoch": 1, "batch": rank}}
    sizes = {f"uneven.{n}": torch.zeros(2 + rank) for n in range(2)}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        async_save({"model": sharded, "state": shards, **others, **sizes}, tmp_path).result()
        for thread in threading.enumerate():
            if thread.name == "fullshard async_save":
                thread.join()
    names = "loader.batch, state.head.exp_avg, state.step, uneven.0 and 1 more"
    assert [f"of {names}, and the" in str(each.message) for each in found] == [True] * (rank == 0)


@distributed(2)
def test_an_error_of_one_writer_surfaces_on_every_rank_and_the_old_checkpoint_stays(
    tmp_path: Path,
) -> None:
    net = sharded(build())
    optimizer = adamw(net.parameters())
    train(net, optimizer, range(1))
    async_save(capture(net, optimizer, 1), tmp_path / "c").result()
    state = capture(net, optimizer, 2)
    with pytest.raises(SaveError, match=r"untouched: rank 1: OSError: .*No space left"):
        _failed_on_rank_1(state, tmp_path / "c").result()
    _failed_on_rank_1(state, tmp_path / "c")  # nobody asks
    with pytest.raises(SaveError, match="No space left"):
        async_save(state, tmp_path / "c")
    dist.barrier()
    assert restored(tmp_path / "c", fully_shard(build(1))) == 1
    async_save(state, tmp_path / "c").result()  # what was told once is not told again
    dist.barrier()
    assert restored(tmp_path / "c", fully_shard(build(1))) == 2


@distributed(1, fresh=True)
def test_a_save_without_a_file_descriptor_left_leaves_no_folder(tmp_path: Path) -> None:
    finish = FileSystemWriter.finish

    def finish_with_the_last_descriptor(*args: Any) -> None:
        finish(*args)
        open_now = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with patch.object(FileSystemWriter, "finish", finish_with_the_last_descriptor):
        pending = async_save({"w": torch.ones(2)}, tmp_path / "c")
        wait([pending])
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with pytest.raises(SaveError, match="Too many open files"):
        pending.result()
    assert not os.listdir(tmp_path / "c")


@distributed(2)
def test_a_copy_that_fails_on_one_rank_is_told_to_the_others(tmp_path: Path) -> None:
    rank = dist.get_rank()
    state = {"w": torch.ones(2), "odd": threading.Lock() if rank == 1 else 0}
    if rank == 1:
        with pytest.raises(TypeError, match="pickle"):
            async_save(state, tmp_path / "c")
    else:
        with pytest.raises(SaveError, match="rank 1: TypeError"):
            async_save(state, tmp_path / "c").result()
    assert not (tmp_path / "c" / ".metadata").exists()
    async_save({"w": torch.ones(2)}, tmp_path / "c").result()


class _Interrupting:
    def __deepcopy__(self, memo: object) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("wrong", ["folder", "interrupt"])
@distributed(2)
def test_after_a_call_that_fails_on_one_rank_the_next_save_is_whole(
    wrong: str, tmp_path: Path
) -> None:
    folder, state = tmp_path / "c", {"w": torch.ones(2), "odd": 0}
    if dist.get_rank() == 1:
        bad: Any = 5 if wrong == "folder" else folder
        odd: Any = _Interrupting() if wrong == "interrupt" else 0
        with pytest.raises((TypeError, KeyboardInterrupt)):
            async_save({**state, "odd": odd}, bad)
    else:
        with pytest.raises(SaveError, match=r"rank 1: (TypeError|KeyboardInterrupt)"):
            async_save(state, folder).result(timeout=20)
    assert async_save(state, folder).result(timeout=20) == folder


@distributed(2)
def test_ranks_that_write_into_other_folders_are_told(tmp_path: Path) -> None:
    net = sharded(build())
    folder = tmp_path / str(dist.get_rank())
    with pytest.raises(SaveError, match="pass the same folder on every rank"):
        async_save(net.state_dict(), folder).result()
    assert not [*folder.glob(".metadata"), *folder.glob("*.distcp")]


def test_without_ranks_it_saves_too(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.arange(4.0), "step": 3}
    pending = async_save(state, tmp_path / "c")
    state["w"].zero_()
    pending.result()
    found: dict[str, Any] = {"w": torch.zeros(4), "step": 0}
    dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert found["w"].tolist() == [0, 1, 2, 3]
    assert found["step"] == 3
    with pytest.raises(TypeError, match="pass a dict"):
        async_save([state], tmp_path / "c")  # type: ignore[arg-type]  # wrong on purpose


_ENDS = """
import sys, torch
from fullshard.checkpoint import async_save
async_save({"w": torch.ones(2_000_000)}, sys.argv[1])
"""


def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    run_python("-W", "ignore", "-c", _ENDS, tmp_path / "c")
    found = {"w": torch.zeros(2_000_000)}
    dcp.load(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert bool((found["w"] == 1).all())


# -- a rank is lost -------------------------------------------------------------------------------


def _dies(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _commits_and_dies(*args: Any) -> Any:
    _commit(*args)
    _dies()


DEATHS: dict[str, tuple[int, Any, Callable[[], Any]]] = {
    "before it writes": (2, FileSystemWriter, lambda: ("write_data", _dies)),
    "before the others write": (1, writing, lambda: ("_agreed", _dies)),
    "before it has told": (2, writing, lambda: ("format_error", _dies)),
    "the first, before it commits": (0, writing, lambda: ("_commit", _dies)),
    "the first, after it committed": (0, writing, lambda: ("_commit", _commits_and_dies)),
}


def _save_while_one_dies(death: str, folder: Path) -> Any:
    odd, owner, replaced = DEATHS[death]
    net = sharded(build())
    async_save({"model": net.state_dict(), "step": 1}, folder).result()
    dist.barrier()
    with patch.object(owner, *replaced()) if dist.get_rank() == odd else nullcontext():
        pending = async_save({"model": net.state_dict(), "step": 2}, folder)
        error = pending.exception(timeout=60)
    assert isinstance(error, SaveError)
    return str(error), error.lost


@pytest.mark.parametrize("death", few(DEATHS, "before it writes", "the first, after it committed"))
def test_a_rank_that_dies_is_named_on_the_others_and_a_whole_checkpoint_is_there(
    death: str, tmp_path: Path
) -> None:
    odd, _, _ = DEATHS[death]
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_save_while_one_dies, 3, death, tmp_path / "c", fresh=True)
    assert caught.value.exit_codes == {odd: -signal.SIGKILL}
    new = death == "the first, after it committed"
    fate = "was written" if new else "was not written, what was there is untouched"
    for rank in {0, 1, 2} - {odd}:
        text, lost = caught.value.results[rank]
        assert lost == (odd,)
        assert f"c {fate}: rank {odd} was lost: its process ended" in text
        assert "Restart the job, and load" in text
    state: dict[str, Any] = {"step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert state["step"] == (2 if new else 1)


# -- the fault drill ------------------------------------------------------------------------------

# Two ranks save checkpoint after checkpoint, all of whose numbers are its step, until they are
# killed at a moment drawn at random. Forked from a process that has imported torch, they start in
# no time.
_DRILL = """
import os, random, signal, sys, time, warnings
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from pathlib import Path
from torch import nn
from fullshard.checkpoint import async_save
from fullshard.sharding import fully_shard

warnings.simplefilter("ignore")
torch.set_num_threads(1)

def net():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])

def save_for_ever(rank, folder, told):
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = fully_shard(net())
    for step in range(1, 10**6):
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().fill_(step)
        pending = async_save({"model": model.state_dict(), "step": step}, folder / "c")
        if rank == 0:
            os.write(told, bytes([step % 256]))
        pending.result()

def forked(rank, folder, told):
    pid = os.fork()
    if pid == 0:
        try:
            save_for_ever(rank, folder, told)
        finally:
            os._exit(1)
    return pid

old = new = 0
moments = random.Random(0)
for kill in range(int(sys.argv[1])):
    folder = Path(sys.argv[2], str(kill))
    folder.mkdir()
    heard, told = os.pipe()
    pids = [forked(rank, folder, told) for rank in range(2)]
    while os.read(heard, 1)[0] < 3:
        pass
    time.sleep(moments.uniform(0, 0.1))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(heard), os.close(told)
    state = {"model": {k: torch.zeros_like(v) for k, v in net().state_dict().items()}, "step": -1}
    dcp.load(state, checkpoint_id=folder / "c", no_dist=True)
    for name, value in state["model"].items():
        assert bool((value == state["step"]).all()), (name, state["step"])
    assert state["step"] >= 2, state["step"]  # it was whole when the third save began
    old, new = old + (state["step"] == 2), new + (state["step"] > 2)
print(f"{old + new} kills: {old} left the old checkpoint, {new} a newer one")
"""


@pytest.mark.matrix  # the campaign kills during saves, too
@pytest.mark.parametrize("kills", [50])
def test_killed_at_a_random_moment_of_a_save_a_whole_checkpoint_is_there(
    kills: int, tmp_path: Path
) -> None:
    print(run_python("-c", _DRILL, str(kills), tmp_path))
