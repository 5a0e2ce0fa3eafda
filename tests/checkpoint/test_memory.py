"""Checkpoints in memory: what a restart finds after hosts are lost, and what a kill leaves."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fullshard.checkpoint import (
    MemoryCheckpointError,
    MemoryCheckpoints,
    full_optim_state_dict,
    memory_runs,
)
from fullshard.checkpoint.memory import checkpoints, room, sending
from fullshard.checkpoint.memory.contents import Contents
from fullshard.checkpoint.memory.hosts import Hosts
from support.pool.ranks import RanksFailed
from support.products import few
from support.ranks import distributed, run_on_ranks
from support.surface.model import build, train
from support.surface.ranks import full_parameters
from support.surface.wrappings import WRAPPINGS, adamw, hybrid

WAYS = {**WRAPPINGS, "hybrid": hybrid}


def opened(folder: Path, *, per_host: int = 2, **options: Any) -> MemoryCheckpoints:
    """Hosts are groups of ``per_host`` ranks, and each has a folder of its own."""
    host = dist.get_rank() // per_host
    return MemoryCheckpoints("run", host=host, folder=folder / str(host), **options)


class Job:
    """A model in training, with everything that a restart needs."""

    def __init__(self, way: str = "blocks", seed: int = 0) -> None:
        self.net = WAYS[way](build(seed))
        self.optimizer = adamw(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        torch.manual_seed(100 * seed + dist.get_rank())
        self.position = 0

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler,
            "random": torch.get_rng_state(),
            "position": self.position,
            "rank": dist.get_rank(),
        }

    def train(self, steps: int) -> list[float]:
        """Each step draws from the generator of the rank."""
        losses = []
        for _ in range(steps):
            noise = torch.randn(4, 6)
            dist.broadcast(noise, 0)
            losses += train(
                self.net, self.optimizer, [self.position], {self.position: noise}.__getitem__
            )
            self.scheduler.step()
            self.position += 1
        return losses

    def whole(self) -> dict[str, torch.Tensor]:
        """The full parameters and the full optimizer state."""
        state = full_optim_state_dict(self.net, self.optimizer, rank0_only=False)["state"]
        moments = {f"{k} {key}": v for k, each in state.items() for key, v in each.items()}
        return {**full_parameters(self.net), **moments}

    def restore(self, memory: MemoryCheckpoints) -> tuple[int | None, int]:
        """The step, and which rank's values this rank has."""
        state = self.state()
        step = memory.restore(state)
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.net, self.optimizer, **parts)
        torch.set_rng_state(state["random"])
        self.position = state["position"]
        return step, state["rank"]


def first_run(folder: Path, way: str = "blocks", *, steps: int = 3, **options: Any) -> Any:
    """Saves each step, and returns what a run without a loss does next."""
    memory, job = opened(folder, **options), Job(way)
    for step in range(1, steps + 1):
        job.train(1)
        memory.save(step, job.state())
    saved = job.whole()
    losses = job.train(2)  # beside the last save
    memory.close()
    return saved, losses, job.whole()


def second_run(folder: Path, way: str = "blocks", **options: Any) -> Any:
    memory, job = opened(folder, **options), Job(way, seed=1)
    step, rank = job.restore(memory)
    restored = job.whole()
    losses = job.train(2)
    memory.close()
    return step, rank, restored, losses, job.whole()


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def assert_goes_on(first: Any, second: Any, step: int = 3) -> None:
    assert second[0] == step
    for one, other in ((first[0], second[2]), (first[2], second[4])):
        assert_equal(one, other)
    assert first[1] == second[3]


@pytest.mark.parametrize("lost", [0, 1, None])
def test_after_the_loss_of_any_host_a_run_goes_on_to_the_bit(
    lost: int | None, tmp_path: Path
) -> None:
    first = run_on_ranks(first_run, 4, tmp_path)
    if lost is not None:
        shutil.rmtree(tmp_path / str(lost))
    second = run_on_ranks(second_run, 4, tmp_path)
    for rank in range(4):
        assert second[rank][1] == rank
        assert_goes_on(first[rank], second[rank])


@pytest.mark.cross
@pytest.mark.parametrize(
    "way", few(["hybrid", "columns", "blocks", "replicas", "offloaded"], "hybrid", "columns")
)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("lost", [1, 0])
def test_another_number_of_ranks_has_the_parameters_to_the_bit(
    way: str, ranks: int, lost: int, tmp_path: Path
) -> None:
    first = run_on_ranks(first_run, 4, tmp_path, way)
    shutil.rmtree(tmp_path / str(lost))
    second = run_on_ranks(second_run, ranks, tmp_path, "blocks", per_host=1)
    for rank in range(ranks):
        step, own, restored, *_ = second[rank]
        assert (step, own) == (3, rank)
        assert_equal(first[0][0], restored)


def restored_twice(folder: Path) -> Any:
    steps = []
    for _ in range(2):  # nothing goes before the first save
        memory = opened(folder)
        steps.append(Job(seed=1).restore(memory)[0])
        memory.close()
    return steps


def test_two_lost_neighbours_are_told_to_every_rank(tmp_path: Path) -> None:
    run_on_ranks(first_run, 4, tmp_path)
    for host in "01":
        shutil.rmtree(tmp_path / host)
    assert run_on_ranks(restored_twice, 4, tmp_path) == [[None, None]] * 4


@pytest.mark.parametrize(
    ("lost", "step"), [((0, 2), 3), pytest.param((1, 2), None, marks=pytest.mark.matrix)]
)
def test_of_four_hosts_two_may_go_that_are_no_neighbours(
    lost: tuple[int, ...], step: int | None, tmp_path: Path
) -> None:
    run_on_ranks(first_run, 4, tmp_path, per_host=1)
    for host in lost:
        shutil.rmtree(tmp_path / str(host))
    second = run_on_ranks(second_run, 4, tmp_path, per_host=1)
    assert [each[0] for each in second] == [step] * 4


def flipped(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


@pytest.mark.parametrize("damage", few(["segment", "manifest", "shorter"], "segment"))
def test_a_damaged_copy_is_not_used(damage: str, tmp_path: Path) -> None:
    first = run_on_ranks(first_run, 4, tmp_path)
    newest = "rank-00001.0.own"  # the third of two slots
    (own,) = (tmp_path / "0").glob(f"run/*/{newest}")
    if damage == "segment":
        flipped(own, 100)
    elif damage == "manifest":
        flipped(own.with_name(f"{newest}.manifest"), 300)
    else:
        os.truncate(own, 10)
    second = run_on_ranks(second_run, 4, tmp_path)
    for rank in range(4):
        assert_goes_on(first[rank], second[rank])
    (copy,) = (tmp_path / "1").glob("run/*/rank-00001.0.copy")
    flipped(copy, 100)  # now the step before is the newest
    assert [each[0] for each in run_on_ranks(second_run, 4, tmp_path)] == [2] * 4


# -- kills ----------------------------------------------------------------------------------------


def _dies(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS: dict[str, Any] = {
    "while it copies": (Contents, "copy_to"),
    "before it seals": (checkpoints, "checksum"),
    "before it sends": (sending, "_exchange"),
    "before it seals what it received": (sending, "checksum"),
}


def _killed(death: str, folder: Path, odd: int) -> Any:
    """Which ranks the others lost, and the parameters by step."""
    memory, job = opened(folder), Job()
    parameters = {}
    for step in (1, 2):
        job.train(1)
        parameters[step] = job.whole()
        memory.save(step, job.state())
    memory.wait()
    job.train(1)
    parameters[3] = job.whole()
    owner, name = DEATHS[death]
    with patch.object(owner, name, _dies) if dist.get_rank() == odd else nullcontext():
        error = memory.save(3, job.state()).exception(timeout=60)
    assert isinstance(error, MemoryCheckpointError)
    return error.lost, parameters


@pytest.mark.parametrize(
    ("death", "odd"),
    [
        ("while it copies", 2),
        *(pytest.param(death, 2, marks=pytest.mark.matrix) for death in [*DEATHS][1:]),
        *(pytest.param(death, 0, marks=pytest.mark.matrix) for death in DEATHS),
    ],
)
def test_a_kill_during_a_save_leaves_a_whole_step(death: str, odd: int, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_on_ranks(_killed, 4, death, tmp_path, odd, fresh=True)
    assert caught.value.exit_codes == {odd: -signal.SIGKILL}
    (found,) = memory_runs(tmp_path / "0")
    assert (found.name, found.process_ids) == ("run", ())
    shutil.rmtree(tmp_path / str(odd // 2))  # its host is lost
    second = run_on_ranks(second_run, 4, tmp_path)
    # once its shards are with the neighbour, the new step is whole, too
    possible = (2, 3) if death == "before it seals what it received" else (2,)
    for rank in {0, 1, 2, 3} - {odd}:
        lost, parameters = caught.value.results[rank]
        step, _, restored, *_ = second[rank]
        assert lost == (odd,)
        assert step in possible
        assert_equal(parameters[step], restored)


# -- what is in memory, and until when ------------------------------------------------------------


@distributed(4)
def test_saves_are_of_the_moment_of_the_call(tmp_path: Path) -> None:
    memory, job = opened(tmp_path), Job()
    job.train(1)
    expected = job.whole()
    pending = memory.save(1, job.state())
    with torch.no_grad():
        for param in job.net.parameters():
            param.to_local().fill_(7)  # before, while or after the thread sends
    pending.result()
    assert job.restore(memory)[0] == 1  # in the same attempt
    assert_equal(expected, job.whole())
    for step in (2, 3, 2):  # the last save counts, whatever its step
        job.train(1)
        memory.save(step, job.state())
    expected = job.whole()
    job.train(1)
    assert job.restore(memory)[0] == 2
    assert_equal(expected, job.whole())
    memory.purge()


def third_run(folder: Path) -> list[list[str]]:
    memory, job = opened(folder), Job(seed=1)
    assert job.restore(memory)[0] == 3
    job.train(1)
    names = []
    for step in (4, 5):
        memory.save(step, job.state()).result()
        dist.barrier()
        names.append(sorted(each.name[:6] for each in (folder / "0" / "run").iterdir()))
        dist.barrier()
    memory.close()
    return names


def test_a_restart_keeps_the_step_it_began_with_until_its_first_save(tmp_path: Path) -> None:
    run_on_ranks(first_run, 4, tmp_path)
    names = run_on_ranks(third_run, 4, tmp_path)[0]
    assert names == [["000002"], ["000002"]]
    shutil.rmtree(tmp_path / "1")
    assert [each[0] for each in run_on_ranks(second_run, 4, tmp_path)] == [5] * 4


@distributed(4)
def test_the_end_of_the_block_removes_the_memory_and_an_error_leaves_it(tmp_path: Path) -> None:
    job = Job()
    job.train(1)
    with pytest.raises(KeyError), opened(tmp_path) as memory:
        memory.save(1, job.state()).result()
        raise KeyError
    dist.barrier()
    (left,) = memory_runs(tmp_path / "0")
    assert left.steps == (1,)
    assert left.process_ids == ()
    assert left.nbytes > 0
    dist.barrier()
    with opened(tmp_path) as memory:
        assert job.restore(memory)[0] == 1
        memory.save(2, job.state())
        if dist.get_rank() == 0:
            (used,) = memory_runs(tmp_path / "0")
            assert os.getpid() in used.process_ids
            with pytest.raises(RuntimeError, match="end them first"):
                used.remove()
    dist.barrier()
    assert memory_runs(tmp_path / "0") == []
    with pytest.raises(MemoryCheckpointError, match="are closed"):
        memory.save(3, job.state())


def test_what_a_kill_left_is_removed_by_name(tmp_path: Path) -> None:
    run_on_ranks(first_run, 4, tmp_path)
    for each in memory_runs(tmp_path / "1"):
        each.remove()
    assert memory_runs(tmp_path / "1") == []
    assert memory_runs(tmp_path / "none") == []
    assert len(memory_runs(tmp_path / "0")) == 1


@distributed(4)
def test_too_little_room_is_told_to_every_rank_before_training(tmp_path: Path) -> None:
    job = Job()
    memory = opened(tmp_path, budget_gb=0.001)
    with pytest.raises(MemoryCheckpointError, match=r"host 0 needs .* its budget is 0.00 GiB"):
        memory.reserve(job.state())
    memory.close()
    dist.barrier()
    memory = opened(tmp_path)
    rank = dist.get_rank()
    short = patch.object(checkpoints, "free_bytes", lambda _: 1000)
    with short if rank == 3 else nullcontext():
        text = r"need .* GiB in .*, and 0.00 GiB are free.* keep fewer"
        with pytest.raises(MemoryCheckpointError, match=text):
            memory.save(1, job.state())
    memory.save(1, job.state()).result()
    memory.purge()


def test_room_is_for_own_shards_and_those_of_the_host_before() -> None:
    mib = 2**20
    rooms = [room.Room(n * mib, "a", "/a", 100 * mib, 0, None) for n in (1, 2, 3, 4)]
    assert room.missing_room(rooms, Hosts("0011"), 2) == ""
    few = [room.Room(n * mib, "a", "/a", 39 * mib, 0, None) for n in (1, 2, 3, 4)]
    assert "0.04 GiB in /a, and 0.04" in room.missing_room(few, Hosts("0011"), 2)
    old = [room.Room(n * mib, "a", "/a", 39 * mib, mib, None) for n in (1, 2, 3, 4)]
    assert room.missing_room(old, Hosts("0011"), 2) == ""
    assert [Hosts("00011").target(rank) for rank in range(5)] == [3, 4, 3, 0, 1]
    assert Hosts("00011").sources(3) == [0, 2]
    assert Hosts("00").target(0) is None


@distributed(2)
def test_what_one_rank_finds_wrong_every_rank_raises(tmp_path: Path) -> None:
    rank = dist.get_rank()
    with pytest.raises(MemoryCheckpointError, match="rank 1: ValueError: run is 'a/b'"):
        MemoryCheckpoints("a/b" if rank else "a", folder=tmp_path)
    with pytest.raises(MemoryCheckpointError, match=r"different .*pass the same on every rank"):
        MemoryCheckpoints("a", folder=tmp_path, keep=2 + rank)
    with pytest.raises(MemoryCheckpointError, match="keep is 1; pass 2 or more"):
        MemoryCheckpoints("a", folder=tmp_path, keep=1)
    dist.barrier()
    open_to_all = tmp_path / "open"
    open_to_all.mkdir(exist_ok=True)
    open_to_all.chmod(0o777)
    dist.barrier()
    with pytest.raises(MemoryCheckpointError, match=r"PermissionError.*nobody else who may write"):
        MemoryCheckpoints("a", folder=open_to_all)
    memory = MemoryCheckpoints("a", folder=tmp_path, host=rank)
    with pytest.raises(MemoryCheckpointError, match="use the memory of run a"):
        MemoryCheckpoints("a", folder=tmp_path, host=rank)
    with pytest.raises(MemoryCheckpointError, match="rank 1: TypeError"):
        memory.save(1, {"odd": open(os.devnull) if rank else 1})  # noqa: SIM115
    memory.save(0, {"odd": 0}).result()
    if rank == 1:
        with pytest.raises(TypeError, match="pickle"):
            memory.save(1, {"odd": open(os.devnull)})  # noqa: SIM115
    else:
        with pytest.raises(MemoryCheckpointError, match="rank 1: TypeError"):
            memory.save(1, {"odd": 1}).result()
    memory.save(1, {"odd": 1, "w": torch.ones(2)}).result()
    with pytest.raises(MemoryCheckpointError, match=r"step 1 cannot be loaded.*Missing key"):
        memory.restore({"other": 1})
    state = {"odd": 0, "w": torch.zeros(2)}
    assert memory.restore(state) == 1
    assert state["odd"] == 1
    memory.purge()


def test_one_process_alone_keeps_its_memory_too(tmp_path: Path) -> None:
    memory = MemoryCheckpoints("alone", folder=tmp_path)
    w = torch.arange(4.0)
    state = {"w": w, "empty": torch.zeros(0, 3), "n": [1, {"x": "y"}]}
    memory.save(5, state)
    w.zero_()
    memory.close()
    again = MemoryCheckpoints("alone", folder=tmp_path)
    found: dict[str, Any] = {"w": torch.zeros(4), "empty": torch.zeros(0, 3)}
    found["n"] = [0, {"x": 0}]
    assert again.restore(found) == 5
    assert found["w"].tolist() == [0, 1, 2, 3]
    assert found["n"] == [1, {"x": "y"}]
    again.purge()
    assert not [*tmp_path.iterdir()]
