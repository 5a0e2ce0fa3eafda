"""Shards in files: the steps of the run without, the memory that they leave, errors of a disk."""

from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fullshard.optim import FileTier, OffloadedOptimizer, OverlappedStep
from fullshard.policies import CPUOffloadPolicy, FileOffloadPolicy, MixedPrecisionPolicy, shard_file
from fullshard.policies.file_space import FileSpace
from fullshard.policies.shard_file import ShardFile
from fullshard.sharding import FSDPModule, RankMismatchError, fully_shard, unsharded
from support.optim.offloaded import (
    Program,
    adamw,
    are_in_file,
    assert_equal_runs,
    in_file,
    part,
    run_both,
)
from support.ranks import distributed
from support.surface.model import batch, build, sharded, train
from support.surface.ranks import everyone

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
PROGRAMS = {
    "adamw": Program(),
    "accumulation and clipping": Program(micro_batches=3, clip=0.1),
    "mixed precision": Program(arguments={"mp_policy": BF16}),
    "full until backward": Program(arguments={"reshard_after_forward": False}),
    "closure": Program(lambda model: adamw(model, foreach=False), closure=True),
    "fused": Program(lambda model: adamw(model, fused=True)),
}


def assert_in_file(model: nn.Module, policy: FileOffloadPolicy) -> None:
    assert are_in_file(model.parameters(), policy)


# -- the same steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
@distributed(2)
def test_steps_equal_those_without_offload_to_the_bit(name: str, tmp_path: Path) -> None:
    program, policy = PROGRAMS[name], in_file(tmp_path)
    mine = sharded(build(), **program.arguments, offload_policy=policy)
    theirs = sharded(build(), **program.arguments)
    run_both(program, mine, theirs)
    assert_in_file(mine, policy)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.device(paces=True)
@pytest.mark.parametrize(("state", "gradients"), [(True, False), (False, False), (True, True)])
@distributed(2)
def test_steps_with_the_optimizers_state_in_files_too_are_equal(
    state: bool, gradients: bool, tmp_path: Path
) -> None:
    policy = in_file(tmp_path, optimizer_state=state, gradients=gradients)
    on_host = CPUOffloadPolicy(optimizer_state=state)  # norms of a device are rounded otherwise
    mine, theirs = (sharded(build(), offload_policy=each) for each in (policy, on_host))
    one = OffloadedOptimizer(adamw(mine), FileTier(tmp_path, bucket_mb=1e-4, min_bytes=1))
    other = adamw(theirs)
    Program(micro_batches=2, clip=0.1).run(mine, one, range(3))
    Program(micro_batches=2, clip=0.1).run(theirs, other, range(3))
    for name, param in mine.named_parameters():
        assert torch.equal(part(param), part(dict(theirs.named_parameters())[name]))
    assert not gradients or are_in_file((param.grad for param in mine.parameters()), policy)
    assert policy.statistics.resident_bytes <= 0.01 * 2**20


@pytest.mark.parametrize("assign", [True, False])
@distributed(2)
def test_a_state_dict_moves_into_and_out_of_the_file(assign: bool, tmp_path: Path) -> None:
    policy = in_file(tmp_path)
    mine, theirs = sharded(build(1), offload_policy=policy), sharded(build(2))
    train(theirs, adamw(theirs), range(1))
    saved = {name: value.clone() for name, value in theirs.state_dict().items()}
    mine.load_state_dict(saved, assign=assign)
    one, other = adamw(mine), adamw(theirs)
    assert train(mine, one, range(2)) == train(theirs, other, range(2))
    assert_equal_runs(mine, one, theirs, other)
    assert_in_file(mine, policy)
    theirs.load_state_dict(mine.state_dict())
    assert train(mine, one, range(2, 4)) == train(theirs, other, range(2, 4))


@distributed(2)
def test_a_model_from_the_meta_device_moves_into_the_file_before_its_first_forward(
    tmp_path: Path,
) -> None:
    policy = in_file(tmp_path)
    with torch.device("meta"):
        model = build()
    sharded(model, offload_policy=policy).to_empty(device="cpu")
    model.load_state_dict(sharded(build()).state_dict())
    expected = build()
    assert torch.allclose(model(batch()), expected(batch()))
    assert_in_file(model, policy)


# -- what is in memory ----------------------------------------------------------------------------


def _file(folder: Path, *, shards: int, **bytes_: int) -> tuple[ShardFile, list[torch.Tensor]]:
    """A file with shards of 8 KiB."""
    file = ShardFile(FileSpace(folder, prefix="test", direct=False), **bytes_)
    return file, [file.store(torch.full((2048,), float(n))) for n in range(shards)]


def _use(file: ShardFile, shard: torch.Tensor) -> None:
    found = file.find(shard)
    assert found is not None
    file.require(found, in_order=True)


def test_the_second_pass_reads_ahead_what_the_first_one_used_next(tmp_path: Path) -> None:
    """Forward and backward use a shard in two places of a pass, with other shards after it."""
    file, shards = _file(tmp_path, shards=6, resident_bytes=3 << 13, ahead_bytes=1 << 13)
    order = [0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0]
    for at in order:
        _use(file, shards[at])
    file.end_pass()
    assert file.reads_ahead == 0
    for place, at in enumerate(order[:-1]):
        _use(file, shards[at])
        ahead = file.find(shards[order[place + 1]])
        assert ahead in file._resident
        assert shards[at][0].item() == at
    assert file.reads_ahead >= 6


@distributed(2)
def test_steps_beside_backward_and_announced_backwards_read_ahead_as_others(tmp_path: Path) -> None:
    """Their gradients are put in place in the middle of a pass."""
    found = []
    for name in ("plain", "overlapped", "announced"):
        policy = in_file(tmp_path, resident_mb=0.05, read_ahead_mb=0.03)
        model: Any = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        for each in (*model, model):
            fully_shard(each, offload_policy=policy)
        optimizer = OverlappedStep(torch.optim.SGD(model.parameters()), model)
        for step in range(4):
            before = policy.statistics.reads_ahead
            model.set_is_last_backward(name != "announced" or step == 3)
            with optimizer.overlap() if name == "overlapped" else nullcontext():
                model(torch.ones(4, 64)).square().mean().backward()
            if name == "overlapped":
                optimizer.step()
                optimizer.zero_grad()
        found.append(policy.statistics.reads_ahead - before)
    assert found[0] > 0 and found == found[:1] * 3


def test_no_more_stays_in_memory_than_asked_for(tmp_path: Path) -> None:
    file, shards = _file(tmp_path, shards=8, resident_bytes=3 << 13, ahead_bytes=0)
    for shard in shards * 2:
        _use(file, shard)
        assert file.resident_bytes <= 3 << 13


def test_space_of_a_shard_that_is_no_longer_used_is_used_again(tmp_path: Path) -> None:
    file, shards = _file(tmp_path, shards=2, resident_bytes=1 << 20, ahead_bytes=0)
    before = file.space.nbytes
    shards[0] = file.store(torch.ones(2048))
    assert file.space.nbytes == before + (1 << 13)
    shards[1] = file.store(torch.zeros(2048))
    assert file.space.nbytes == before + (1 << 13)
    assert len(file._shards) == 2


_PROGRAM = """
import json, sys, threading
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from fullshard.optim import FileTier, OffloadedOptimizer, OverlappedStep
from fullshard.policies import FileOffloadPolicy
from fullshard.sharding import NoOffload, fully_shard

torch.set_num_threads(1)
folder, side, rank, ranks = *sys.argv[1:3], *map(int, sys.argv[3:])
store = dist.FileStore(f"{folder}-{side}-store", ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
caps = {"resident_mb": 8, "read_ahead_mb": 4, "gradients": side == "gradients"}
policy = NoOffload() if side == "memory" else FileOffloadPolicy(folder, **caps)

def peak():
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) / 1024

def share():  # Linux divides a page that several processes map among them
    rollup = Path("/proc/self/smaps_rollup").read_text().split()
    return int(rollup[rollup.index("Pss:") + 1]) / 1024

shares, over = [0.0], threading.Event()

def look():
    while not over.wait(0.005):
        shares.append(share())

nn.Linear(64, 64)(torch.ones(1, 64)).sum().backward()
dist.barrier()
start, start_share = peak(), share()
looking = threading.Thread(target=look)
looking.start()
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)])
for block in model:
    block.to_empty(device="cpu").reset_parameters()
    fully_shard(block, offload_policy=policy)
fully_shard(model, offload_policy=policy)
with torch.no_grad():
    for _ in range(3):
        model(torch.ones(1, 1024))
inference = peak() - start
optimizer = OffloadedOptimizer(torch.optim.AdamW(model.parameters()), FileTier(folder, bucket_mb=4))
for _ in range(3):
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
over.set()
looking.join()
print(json.dumps([inference, peak() - start, max(shares) - start_share]))
"""


def _start(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "MALLOC_MMAP_THRESHOLD_": "65536",  # else malloc keeps what was freed
        },
    )


def _measured(folder: Path, side: str, *, ranks: int = 1) -> list[list[float]]:
    """What each rank prints: MiB in inference and in training, and its share in training."""
    started = [_start(_PROGRAM, str(folder), side, str(rank), str(ranks)) for rank in range(ranks)]
    found = []
    for each in started:
        out, errors = each.communicate()
        assert each.returncode == 0, errors
        found.append(json.loads(out))
    return found


@pytest.mark.matrix
def test_the_peak_of_a_process_does_not_contain_the_parameters(tmp_path: Path) -> None:
    """96 MiB of parameters, of which 8 stay in memory, and gradients of 96 MiB, or 8 with them."""
    folder = tmp_path / "files"
    folder.mkdir()
    found = {side: _measured(folder, side)[0] for side in ("files", "memory", "gradients")}
    inference, training, _ = found["files"]
    inference_in_memory, training_in_memory, _ = found["memory"]
    assert inference < 64 < 96 <= inference_in_memory
    assert training < training_in_memory - 48
    assert found["gradients"][1] < training - 48
    assert list(folder.iterdir()) == []


@pytest.mark.matrix
def test_the_share_of_two_ranks_is_at_most_shards_three_groups_and_64_mib(tmp_path: Path) -> None:
    """A rank has shards of 48 MiB, and gradients as large; the largest group has 4 MiB."""
    folder = tmp_path / "files"
    folder.mkdir()
    for _, _, share in _measured(folder, "gradients", ranks=2):
        assert 16 < share <= 48 + 3 * 4 + 64
    for _, _, share in _measured(folder, "memory", ranks=2):
        assert share > 96  # shards and gradients in memory: what the bound is about


# -- errors ---------------------------------------------------------------------------------------


@distributed(2)
def test_a_full_disk_is_an_error_on_all_ranks_before_the_first_gather(tmp_path: Path) -> None:
    policy = in_file(tmp_path)
    rank = torch.distributed.get_rank()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
        model = sharded(build(), offload_policy=policy)
        with pytest.raises(RankMismatchError, match=r"rank 1: no space for \d+ bytes of a shard"):
            model(batch())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert train(model, adamw(model), range(2)) == pytest.approx(_expected(range(2)))
    assert_in_file(model, policy)


def _expected(steps: range) -> list[float]:
    model = build()
    return train(model, adamw(model), steps)


UNREADABLE = r"rank 1: .*could not be read: Input/output error"


@contextmanager
def unreadable() -> Iterator[None]:
    """Let rank 1 read no shard."""
    advise = shard_file._madvise

    def broken(address: int, nbytes: int, advice: int) -> None:
        if advice == shard_file._POPULATE_READ:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        advise(address, nbytes, advice)

    rank = torch.distributed.get_rank()
    with patch.object(shard_file, "_madvise", broken if rank == 1 else advise):
        yield


@pytest.mark.parametrize("backward", [True, False])
@distributed(2)
def test_a_disk_that_cannot_be_read_is_an_error_on_all_ranks(
    backward: bool, tmp_path: Path
) -> None:
    policy = in_file(tmp_path, resident_mb=0, read_ahead_mb=0)
    model = sharded(build(), offload_policy=policy)
    optimizer = adamw(model)
    losses = train(model, optimizer, range(1))
    before = [part(param).clone() for param in model.parameters()]
    with torch.no_grad():
        expected = model(batch(7))

    def run() -> None:
        if backward:
            model(batch(1)).square().mean().backward()
        else:
            with torch.no_grad():
                model(batch(1))

    with unreadable(), pytest.raises(RuntimeError, match=UNREADABLE):
        run()
    everyone("together")
    assert isinstance(model, FSDPModule)
    model.reset_iter_state()
    with torch.no_grad():
        assert torch.equal(model(batch(7)), expected)  # no wrong value stayed
    model.reshard()
    assert all(map(torch.equal, map(part, model.parameters()), before))
    optimizer.zero_grad()
    assert losses + train(model, optimizer, range(1, 3)) == pytest.approx(_expected(range(3)))


@pytest.mark.parametrize("writeback", [True, False])
@distributed(2)
def test_full_parameters_of_shards_that_cannot_be_read_are_an_error_on_all_ranks(
    writeback: bool, tmp_path: Path
) -> None:
    """Before the block: the wrong values are not seen, and not written back."""
    model = sharded(build(), offload_policy=in_file(tmp_path, resident_mb=0, read_ahead_mb=0))
    with torch.no_grad():
        expected = model(batch())
    with unreadable(), pytest.raises(RuntimeError, match=UNREADABLE):  # noqa: SIM117 # in it
        with unsharded(model, writeback=writeback):
            pytest.fail("the block was entered")
    everyone("together")
    with torch.no_grad():
        assert torch.equal(model(batch()), expected)


@distributed(2)
def test_a_backward_with_shards_that_could_not_be_read_leaves_no_gradients(tmp_path: Path) -> None:
    policy = in_file(tmp_path, resident_mb=0, read_ahead_mb=0)
    model, other = sharded(build(), offload_policy=policy), sharded(build())
    for each in (model, other):
        assert isinstance(each, FSDPModule)
        for number in range(3):
            each.set_requires_gradient_sync(number == 2)
            if each is model and number == 0:
                with unreadable(), pytest.raises(RuntimeError, match=UNREADABLE):
                    each(batch(7)).square().mean().backward()
                each.reset_iter_state()
            each(batch(number)).square().mean().backward()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(part(one.grad), part(two.grad)) for one, two in pairs)


def test_pages_that_the_file_lacks_are_an_error_and_not_a_signal(tmp_path: Path) -> None:
    file, shards = _file(tmp_path, shards=3, resident_bytes=0, ahead_bytes=0)
    _use(file, shards[2])
    file._dropper.submit(int).result()  # after the last page was dropped
    os.ftruncate(file.space.fd, 0)
    with pytest.raises(OSError, match="Input/output error"):
        _use(file, shards[0])


def test_a_page_that_cannot_be_written_is_reported_and_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(failed: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shard_file, "_checked", broken)
    file, shards = _file(tmp_path, shards=2, resident_bytes=0, ahead_bytes=0)
    file._dropper.submit(int).result()
    assert "8192 bytes of a shard could not be written: Input/output error" in file.take_error()
    assert file.take_error() == ""
    assert shards[0].tolist() == [0.0] * 2048


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, torch\n"
        "from fullshard.policies import FileOffloadPolicy\n"
        "policy = FileOffloadPolicy(sys.argv[1], min_bytes=1)\n"
        "shard = policy.store(torch.ones(4096))\n"
        "assert policy.statistics.file_bytes == 16384\n"
        "assert os.listdir(sys.argv[1]) == []\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = _start(program, str(tmp_path))
    _, errors = ended.communicate()
    assert ended.returncode == -9, errors
    assert list(tmp_path.iterdir()) == []


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "found"),
    [
        ("missing", "No such file or directory"),
        ("file", "Not a directory"),
        ("/proc/self", "No such file or directory|Permission denied"),
    ],
)
def test_a_folder_that_takes_no_file_is_an_error(folder: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=rf"^folder is .*: ({found}); pass an existing folder"):
        FileOffloadPolicy(tmp_path / folder)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs at a known place")
def test_a_folder_in_memory_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="'/dev/shm', which is on a tmpfs: its files are memory"):
        FileOffloadPolicy("/dev/shm")


@pytest.mark.parametrize(
    ("options", "kind", "found"),
    [
        ({"resident_mb": -1}, ValueError, "resident_mb is -1"),
        ({"resident_mb": "1"}, TypeError, "resident_mb is '1'"),
        ({"read_ahead_mb": 300}, ValueError, "pass a larger resident_mb"),
        ({"min_bytes": 0}, ValueError, "min_bytes"),
        ({"gradients": None}, TypeError, "gradients is None"),
        ({"optimizer_state": 1}, TypeError, "optimizer_state is 1"),
    ],
)
def test_options_out_of_range_are_errors(
    options: dict[str, Any], kind: type[Exception], found: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=found):
        FileOffloadPolicy(tmp_path, **options)
    with pytest.raises(TypeError, match="folder is a int"):
        FileOffloadPolicy(3)  # type: ignore[arg-type] # what is tested


def test_a_copy_is_equal_and_has_a_file_of_its_own(tmp_path: Path) -> None:
    policy = FileOffloadPolicy(tmp_path, resident_mb=7, read_ahead_mb=5)
    for other in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), replace(policy)):
        assert other == policy and hash(other) == hash(policy)
        assert other._file is not policy._file


def test_small_shards_and_those_of_other_classes_stay_in_memory(tmp_path: Path) -> None:
    policy = FileOffloadPolicy(tmp_path, min_bytes=4096)
    small, large = torch.ones(1023), torch.ones(1024)
    assert policy.store(small) is small
    stored = policy.store(large)
    assert policy.store(stored) is stored and stored is not large
    assert torch.equal(stored, large)
    for other in (large.as_subclass(Own), large.to("meta"), torch.ones(64, 64).t()):
        assert policy.store(other) is other


class Own(torch.Tensor):
    """A tensor subclass, which may be more than its memory."""
