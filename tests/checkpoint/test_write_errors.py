"""Disks that are full, read-only or cut a write short: one error on all ranks, the old stays."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from fullshard.checkpoint import (
    MemoryCheckpointError,
    MemoryCheckpoints,
    SaveError,
    async_save,
    check_checkpoint,
    load_safetensors,
    save_safetensors,
)
from fullshard.checkpoint.files.write_errors import write_error
from fullshard.checkpoint.saving import writing
from fullshard.sharding import fully_shard
from fullshard.sharding.spi import local_of
from support.ranks import distributed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SIZE = 64


def _model(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    for each in model:
        fully_shard(each)
    fully_shard(model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def _of_all_ranks(error: BaseException | None) -> str:
    """Returns the text of the error, which all ranks must have alike."""
    code = error.errno if isinstance(error, OSError) else None
    mine = (type(error), code, str(error))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert everyone == [mine] * len(everyone)
    return str(error)


@contextmanager
def _raising(owner: Any, name: str, code: int, nth: int = 1) -> Iterator[None]:
    """The ``nth`` call raises what the system raises."""
    original, count = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == nth:
            raise OSError(code, os.strerror(code))
        return original(*args, **kwargs)

    with patch.object(owner, name, call):
        yield
    assert count[0] >= nth


@contextmanager
def _files_of_at_most(nbytes: int) -> Iterator[None]:
    """The system refuses to make a file of this process larger."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _full_disk() -> AbstractContextManager[Any]:
    """Data files of ``torch.distributed.checkpoint`` are on a device that is always full."""

    @contextmanager
    def opened(self: FileSystem, path: Path, mode: str) -> Iterator[Any]:
        with open("/dev/full", mode) as stream:
            yield stream

    return patch.object(FileSystem, "create_stream", opened)


# -- checkpoints ----------------------------------------------------------------------------------

DISKS: dict[str, tuple[int, Callable[[], AbstractContextManager[Any]], str]] = {
    "full": (1, _full_disk, r"rank 1: OSError: \[Errno 28\] No space left on device: .*/__1_\w+"),
    "file limit": (1, lambda: _files_of_at_most(4096), r"rank 1: OSError: .*File too large: .*"),
    "quota": (1, lambda: _raising(os, "fsync", errno.EDQUOT), r"rank 1: .*quota exceeded: .*"),
    "full at the end": (0, _full_disk, r"rank 0: OSError: .*No space left on device: .*"),
    "read-only": (1, lambda: _raising(Path, "mkdir", errno.EROFS), "rank 1: .*may write"),
}
NEEDED = 2 * (SIZE * SIZE + SIZE) // 2 * 4  # of one rank


@pytest.mark.parametrize("disk", DISKS)
@distributed(2, fresh=True)
def test_a_checkpoint_that_cannot_be_written_raises_alike_and_the_old_one_stays(
    disk: str, tmp_path: Path
) -> None:
    folder = tmp_path / "c"
    old, new = _model(1.0).state_dict(), _model(2.0).state_dict()
    async_save(old, folder).result()
    dist.barrier()
    names = sorted(os.listdir(folder))
    odd, bad, said = DISKS[disk]
    with bad() if dist.get_rank() == odd else nullcontext():
        text = _of_all_ranks(async_save(new, folder).exception())
    with pytest.raises(SaveError, match=f"untouched: {said}"):
        raise SaveError(folder, text.partition("untouched: ")[2])
    assert "unexpected pos" not in text
    if disk == "full":
        assert f".distcp: {NEEDED} bytes are to be written, and " in text
        assert "files are free. Free some space" in text
    assert sorted(os.listdir(folder)) == names
    assert check_checkpoint(folder)
    dcp.load(new, checkpoint_id=folder)
    assert all(bool((each.to_local() == 1.0).all()) for each in new.values())


@distributed(2)
def test_a_disk_that_fails_after_the_commit_leaves_both_checkpoints_whole(tmp_path: Path) -> None:
    async_save(_model(1.0).state_dict(), tmp_path).result()
    dist.barrier()
    names, state = set(os.listdir(tmp_path)), _model(2.0).state_dict()
    failing = _raising(writing, "_to_disk", errno.EIO, 2)
    with failing if dist.get_rank() == 0 else nullcontext():
        async_save(state, tmp_path).result()
    dist.barrier()
    assert names < set(os.listdir(tmp_path))
    assert check_checkpoint(tmp_path)
    dcp.load(found := _model(0.0).state_dict(), checkpoint_id=tmp_path)
    assert all(bool((each.to_local() == 2.0).all()) for each in found.values())


@distributed(2)
def test_a_folder_of_a_checkpoint_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    dist.barrier()
    text = _of_all_ranks(async_save({"w": torch.ones(2)}, tmp_path / "c").exception())
    assert f"rank 1: FileExistsError: [Errno 17] File exists: {tmp_path}/c. Pass a folder" in text


@distributed(2)
def test_a_folder_in_the_place_of_metadata_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / ".metadata").mkdir(exist_ok=True)
    dist.barrier()
    text = _of_all_ranks(async_save({"w": torch.ones(2)}, tmp_path).exception())
    assert f"Is a directory: {tmp_path}/.metadata. A folder has the name of a file" in text
    assert os.listdir(tmp_path) == [".metadata"]


# -- safetensors ----------------------------------------------------------------------------------

WRITES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], int, str]] = {
    "full": (lambda: _raising(os, "pwrite", errno.ENOSPC), errno.ENOSPC, "files are free. Free"),
    "full at fsync": (lambda: _raising(os, "fsync", errno.ENOSPC), errno.ENOSPC, "files are free"),
    "quota": (lambda: _raising(os, "pwrite", errno.EDQUOT, 2), errno.EDQUOT, "Remove files"),
    "file limit": (lambda: _files_of_at_most(4096), errno.EFBIG, "(ulimit -f) is 4096 bytes"),
    "read-only": (lambda: _raising(os, "open", errno.EROFS), errno.EROFS, "this user may write"),
    "nothing is written": (lambda: patch.object(os, "pwrite", lambda *_: 0), errno.EIO, "error: "),
}


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("write", WRITES)
@distributed(2, fresh=True)
def test_weights_that_cannot_be_written_raise_alike_and_the_old_set_stays(
    write: str, odd: int, tmp_path: Path
) -> None:
    save_safetensors(_model(1.0), tmp_path, max_shard_size=SIZE * SIZE * 5)
    dist.barrier()
    names, model = sorted(os.listdir(tmp_path)), _model(2.0)
    bad, code, said = WRITES[write]
    with (
        bad() if dist.get_rank() == odd else nullcontext(),
        pytest.raises(OSError, match=os.strerror(code)) as caught,
    ):
        save_safetensors(model, tmp_path, max_shard_size=SIZE * SIZE * 5)
    text = _of_all_ranks(caught.value)
    assert caught.value.errno == code
    assert f"some ranks found an error; rank {odd}: " in text and said in text
    assert (".safetensors: " in text and " bytes are to be written" in text) or code == errno.EROFS
    assert sorted(os.listdir(tmp_path)) == names
    load_safetensors(model, tmp_path)
    assert all(bool((each == 1.0).all()) for each in map(local_of, model.parameters()))


@pytest.mark.parametrize("at", ["the set", "the folder"])
@distributed(2)
def test_what_is_in_the_place_of_weights_is_named(at: str, tmp_path: Path) -> None:
    folder = tmp_path / "w"
    if dist.get_rank() == 0 and at == "the folder":
        folder.write_text("")
    elif dist.get_rank() == 0:
        (folder / "model.safetensors" / "x").mkdir(parents=True)
    dist.barrier()
    with pytest.raises(OSError, match=r"Is a directory|File exists") as caught:
        save_safetensors(_model(1.0), folder)
    text = _of_all_ranks(caught.value)
    if at == "the folder":
        assert f"File exists: {folder}. Pass a folder" in text
    else:
        assert f"Is a directory: {folder}/model.safetensors. A folder has the name" in text
        assert os.listdir(folder) == ["model.safetensors"]


@distributed(2)
def test_writes_that_the_system_cuts_short_go_on(tmp_path: Path) -> None:
    pwrite = os.pwrite
    with patch.object(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at)):
        save_safetensors(_model(3.0), tmp_path)
    dist.barrier()
    model = _model(0.0)
    load_safetensors(model, tmp_path)
    assert all(bool((each == 3.0).all()) for each in map(local_of, model.parameters()))


# -- memory ---------------------------------------------------------------------------------------


@distributed(2)
def test_memory_that_is_full_raises_alike_and_the_old_step_stays(tmp_path: Path) -> None:
    rank = dist.get_rank()
    small, large = {"w": torch.full((4,), 1.0)}, {"w": torch.full((2**20,), 2.0)}
    memory = MemoryCheckpoints("a", folder=tmp_path / str(rank), host=rank)

    def full() -> AbstractContextManager[Any]:
        if rank == 0:
            return nullcontext()
        return _raising(os, "posix_fallocate", errno.ENOSPC)

    with full(), pytest.raises(MemoryCheckpointError) as caught:
        memory.reserve(small)
    said = r"rank 1: OSError: \[Errno 28\] No space left on device: .*/rank-00001.0.own: 1048576"
    assert caught.match(f"{said} bytes are to be written")
    _of_all_ranks(caught.value)
    memory.save(1, small).result()
    with full():
        error = memory.save(2, large).exception()
    assert "rank 1: OSError: [Errno 28] No space left on device" in _of_all_ranks(error)
    state = {"w": torch.zeros(4)}
    assert memory.restore(state) == 1
    memory.purge()


@distributed(2)
def test_a_folder_of_memory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("")
    dist.barrier()
    with pytest.raises(MemoryCheckpointError, match=r"File exists: .*/m\. Pass a folder") as caught:
        MemoryCheckpoints("a", folder=tmp_path / "m")
    _of_all_ranks(caught.value)


# -- the text -------------------------------------------------------------------------------------


def test_the_file_system_of_a_folder_that_was_not_made_is_that_above(tmp_path: Path) -> None:
    told = write_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), tmp_path / "a" / "b", 7)
    assert f"device: {tmp_path}/a/b: 7 bytes are to be written, and " in str(told)
    assert "files are free" in str(told)


def test_an_error_with_a_text_of_its_own_is_left_alone(tmp_path: Path) -> None:
    for error in (OSError(errno.ENOSPC, "the new set needs 5"), ValueError("a"), RuntimeError("b")):
        assert write_error(error, tmp_path) is error
