"""Saved weights, against what the safetensors library reads of them; saves that are killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fullshard.checkpoint import (
    Rule,
    SaveOptions,
    SaveReport,
    load_safetensors,
    save_safetensors,
)
from fullshard.sharding import fully_shard
from support.python import run_python
from support.ranks import distributed
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads
from support.weights import Assorted, files_of, saved, shard_assorted, untied


def _assert_files(folder: Path, state: dict[str, torch.Tensor]) -> None:
    found = files_of(folder)
    assert found.keys() == state.keys()
    for name, value in state.items():
        assert found[name].dtype is value.dtype and torch.equal(found[name], value), name


def _threads_save(
    folder: Path, mesh: tuple[int, ...], dim: int = 0, **kwargs: Any
) -> list[SaveReport]:
    """Saves an Assorted of known values on threads; returns the reports."""
    plain = Assorted()
    state = {name: value.clone() for name, value in plain.state_dict().items()}

    def body(rank: ThreadRank) -> SaveReport:
        model = Assorted()
        model.load_state_dict(state)
        shard_assorted(model, init_device_mesh("cpu", mesh), dim)
        return save_safetensors(model, folder, **kwargs)

    reports = run_program_on_threads(body, torch.Size(mesh).numel())
    _assert_files(folder, untied(plain))
    return reports


@pytest.mark.cross
@pytest.mark.parametrize("writers", [1, 3])
@pytest.mark.parametrize("size", ["5GB", 300])
@pytest.mark.parametrize("mesh", [(2,), (1,), (4,), (2, 2)])
def test_the_files_hold_the_whole_values_bit_for_bit(
    mesh: tuple[int, ...], size: str | int, writers: int, tmp_path: Path
) -> None:
    options = SaveOptions(buffer_bytes=1024, writers_per_file=writers)
    for dim in (0, 1):
        reports = _threads_save(tmp_path, mesh, dim=dim, max_shard_size=size, options=options)
        report = reports[0]
        files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
        assert files == sorted(path.name for path in report.files)
        assert sum(each.bytes_written for each in reports) == sum(
            path.stat().st_size for path in report.files
        )
        assert (report.index is None) == (size == "5GB")


def test_one_writer_per_file_spread_over_ranks(tmp_path: Path) -> None:
    reports = _threads_save(tmp_path, (4,), max_shard_size=1)
    sizes = sorted(path.stat().st_size for path in reports[0].files)
    written = [report.bytes_written for report in reports]
    assert len(sizes) == 9 and all(written)
    assert max(written) - min(written) <= 2 * max(sizes)


def test_several_writers_into_one_file_write_a_range_each(tmp_path: Path) -> None:
    state = {"weight": torch.randn(64, 32)}

    def body(rank: ThreadRank) -> SaveReport:
        model = nn.Linear(32, 64, bias=False)
        model.load_state_dict(state)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        return save_safetensors(model, tmp_path, options=SaveOptions(writers_per_file=4))

    reports = run_program_on_threads(body, 4)
    header = (tmp_path / "model.safetensors").stat().st_size - 64 * 32 * 4
    assert [each.bytes_written for each in reports] == [2048 + header, 2048, 2048, 2048]
    assert [each.bytes_sent for each in reports] == [0] * 4  # each writes what it has
    _assert_files(tmp_path, state)


def test_index_and_headers_are_what_libraries_look_for(tmp_path: Path) -> None:
    options = SaveOptions(metadata={"origin": "a test"})
    (report,) = _threads_save(tmp_path, (1,), max_shard_size=300, options=options)
    assert report.index is not None
    index = json.loads(report.index.read_text())
    assert index["metadata"]["total_size"] == report.total_bytes
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert name in set(opened.keys())
            assert opened.metadata()["format"] == "pt"
            assert opened.metadata()["origin"] == "a test"


def test_the_librarys_load_model_finds_ties(tmp_path: Path) -> None:
    _threads_save(tmp_path, (2,))
    model = Assorted()
    missing, unexpected = load_model(model, tmp_path / "model.safetensors")
    assert not unexpected and set(missing) <= {"head.weight"}


def test_a_dtype_is_that_of_floating_tensors_only(tmp_path: Path) -> None:
    model = Assorted()
    save_safetensors(model, tmp_path, dtype=torch.bfloat16)
    found = files_of(tmp_path)
    assert found["steps"].dtype is torch.int64
    assert torch.equal(found["up.weight"], model.up.weight.bfloat16())


@distributed(2)
def test_statistics_that_differ_on_ranks_are_the_first_ranks(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for buffer in ("1.running_mean", "1.running_var"):
        model.get_buffer(buffer).fill_(rank)
    fully_shard(model)
    save_safetensors(model, tmp_path, max_shard_size=1)  # a file each, of both ranks
    found = files_of(tmp_path)
    assert found["1.running_mean"].tolist() == found["1.running_var"].tolist() == [0.0] * 4


@distributed(2)
def test_a_model_that_is_not_sharded_is_saved_by_the_first_rank_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    rank = torch.distributed.get_rank()
    if rank == 0:
        nn.init.ones_(model.weight)
        assert save_safetensors(model, tmp_path).files
    torch.distributed.barrier()
    if rank == 1:
        assert save_safetensors(model, tmp_path).files == ()
    assert torch.equal(files_of(tmp_path)["weight"], torch.ones(2, 2))


def test_host_memory_beyond_the_shards_is_one_buffer(tmp_path: Path) -> None:
    def body(rank: ThreadRank) -> None:
        model = nn.Linear(1024, 512, bias=False)
        fully_shard(
            model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda p: Shard(1)
        )
        options = SaveOptions(buffer_bytes=64 * 1024)
        sizes: list[int] = []
        empty = torch.empty

        def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = empty(*args, **kwargs)
            sizes.append(0 if made.is_meta else made.nbytes)
            return made

        with patch.object(torch, "empty", watched) if rank.rank == 0 else ExitStack():
            save_safetensors(model, tmp_path, options=options)
        assert max(sizes, default=0) <= 64 * 1024

    tracemalloc.start()
    run_program_on_threads(body, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 64 * 1024 + 1_000_000
    assert (tmp_path / "model.safetensors").stat().st_size > 2 * 2**20


# -- the old set ----------------------------------------------------------------------------------

MUTATIONS = ("open", "pwrite", "replace", "unlink", "fsync", "mkdir")


class _Killed(BaseException):
    pass


@contextmanager
def _killed_at(moment: int) -> Iterator[list[int]]:
    """Ends the process, as far as files can tell: from call ``moment`` on, nothing changes them."""
    count = [0]

    def stopping(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            writes = original is not os_open or args[1] & (os.O_WRONLY | os.O_CREAT | os.O_RDWR)
            if writes:
                count[0] += 1
                if count[0] > moment:
                    raise _Killed
            return original(*args, **kwargs)

        return call

    os_open = os.open
    with ExitStack() as stack:
        for name in MUTATIONS:
            stack.enter_context(patch.object(os, name, stopping(getattr(os, name))))
        yield count


def _loaded(folder: Path) -> dict[str, torch.Tensor]:
    """What this package loads of a folder."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    load_safetensors(model, folder)
    return dict(model.state_dict())


def _by_library(folder: Path, first: str) -> dict[str, torch.Tensor]:
    """What a library loads that looks for the one file first, or for the index."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists() and (first == "single" or not index.exists()):
        return load_file(single)
    found = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        found[name] = load_file(folder / file)[name]
    return found


def _models() -> tuple[nn.Module, nn.Module]:
    old, new = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(2))
    return old, new


def _is(found: dict[str, torch.Tensor], model: nn.Module) -> bool:
    state = model.state_dict()
    return found.keys() == state.keys() and all(torch.equal(found[k], state[k]) for k in state)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("5GB", 60),
        pytest.param(60, "5GB", marks=pytest.mark.matrix),
        pytest.param(60, 60, marks=pytest.mark.matrix),
        pytest.param("5GB", "5GB", marks=pytest.mark.matrix),
    ],
)
def test_a_save_killed_at_any_moment_leaves_a_whole_set_and_the_next_one_cleans_up(
    before: str | int, after: str | int, tmp_path: Path
) -> None:
    old, new = _models()
    seen = set()
    for moment in range(200):
        folder = tmp_path / str(moment)
        save_safetensors(old, folder, max_shard_size=before)
        (folder / "config.json").write_text("{}")
        with _killed_at(moment) as count:
            try:
                save_safetensors(new, folder, max_shard_size=after)
            except _Killed:
                done = False
            else:
                done = True
        for found in (
            _loaded(folder),
            _by_library(folder, "single"),
            _by_library(folder, "index"),
        ):
            assert _is(found, old) or _is(found, new), moment
            seen.add(_is(found, new))
        save_safetensors(new, folder, max_shard_size=after)
        assert _is(_by_library(folder, "single"), new)
        files = {path.name for path in folder.iterdir()} - {"config.json"}
        assert len(files) == (1 if after == "5GB" else len(_files(folder)) + 1)
        if done:
            assert count[0] <= moment
            break
    assert seen == {False, True} and done


def _files(folder: Path) -> set[str]:
    return set(
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
    )


def test_a_set_of_other_names_is_replaced_and_other_files_are_left_alone(tmp_path: Path) -> None:
    old, new = _models()
    saved(tmp_path, {k: v.clone() for k, v in old.state_dict().items()}, files=2)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"another's")
    save_safetensors(new, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_model.safetensors",
        "model.safetensors",
    ]


@pytest.mark.matrix
def test_a_process_that_is_killed_leaves_the_old_set(tmp_path: Path) -> None:
    old, _ = _models()
    save_safetensors(old, tmp_path, max_shard_size=60)
    program = """
import os, signal, sys, torch
from torch import nn
from fullshard.checkpoint import save_safetensors
write, count = os.pwrite, [0]
def pwrite(*args):
    count[0] += 1
    if count[0] == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*args)
os.pwrite = pwrite
save_safetensors(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), sys.argv[1], max_shard_size=60)
"""
    run_python("-c", program, tmp_path, code=-signal.SIGKILL)
    assert len(list(tmp_path.glob("*.safetensors"))) > len(_files(tmp_path))
    assert _is(_loaded(tmp_path), old)
    save_safetensors(old, tmp_path, max_shard_size=60)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == _files(tmp_path)


# -- bad input ------------------------------------------------------------------------------------


def _saves_or_says(folder: Path, tampered: Callable[[int], Any]) -> list[BaseException]:
    """Saves on two threads inside ``tampered(rank)``; returns what each rank raised."""

    def body(rank: ThreadRank) -> BaseException:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        try:
            save_safetensors(model, folder, max_shard_size=60)
        except Exception as error:
            return error
        raise AssertionError("it saved")

    with tampered(0):
        return list(run_program_on_threads(body, 2))


def _assert_old(folder: Path, old: nn.Module) -> None:
    assert _is(_by_library(folder, "single"), old)
    assert {path.name for path in folder.glob("*.safetensors")} == _files(folder)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def _disk(*, blocks: int) -> Any:
    """Stands for ``os.statvfs`` where so many blocks of 4096 bytes are free."""
    found = type("Disk", (), {"f_frsize": 4096, "f_bavail": blocks})()
    return patch("os.statvfs", lambda _: found)


def test_no_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    old, _ = _models()
    save_safetensors(old, tmp_path, max_shard_size=60)
    # four files of a tensor or two, an index, and a block of the folder
    raised = _saves_or_says(tmp_path, lambda rank: _disk(blocks=3))
    said = str(raised[0])
    assert isinstance(raised[0], OSError) and raised[0].errno == errno.ENOSPC
    assert all("has 12288 bytes free, and the new set needs" in str(error) for error in raised)
    _assert_old(tmp_path, old)
    needed = int(said.partition("needs ")[2].partition(":")[0])
    assert f"free {needed - 12288} bytes more" in said
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with _disk(blocks=needed // 4096):  # what it asks for is enough, and a block less is not
        report = save_safetensors(model, tmp_path, max_shard_size=60)
    sizes = [path.stat().st_size for path in (*report.files, report.index) if path]
    assert f"its files have {sum(sizes)}, and" in said
    with _disk(blocks=needed // 4096 - 1), pytest.raises(OSError, match="free 4096 bytes more"):
        save_safetensors(model, tmp_path, max_shard_size=60)


@pytest.mark.parametrize(
    ("call", "nth"), [("pwrite", 1), ("pwrite", 4), ("fsync", 1), ("fsync", 3), ("replace", 1)]
)
def test_a_disk_that_is_full_in_the_middle_leaves_the_old_set(
    call: str, nth: int, tmp_path: Path
) -> None:
    old, _ = _models()
    save_safetensors(old, tmp_path, max_shard_size=60)
    original, count = getattr(os, call), [0]

    def failing(*args: Any) -> Any:
        count[0] += 1
        if count[0] == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    raised = _saves_or_says(tmp_path, lambda rank: patch.object(os, call, failing))
    assert all("No space left" in str(error) for error in raised)
    _assert_old(tmp_path, old)


@distributed(2)
def test_rules_that_produce_a_name_twice_raise_on_every_rank(tmp_path: Path) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)))
    with pytest.raises(ValueError, match=r"w in the files would be produced twice, by 0\.weight"):
        save_safetensors(model, tmp_path, rename=[Rule("0.weight", "w"), Rule("1.weight", "w")])
    assert not list(tmp_path.iterdir())


def test_arguments_are_checked(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for size in ("5 parsecs", 0, "-1GB", "0.1B"):
        with pytest.raises(ValueError, match="max_shard_size"):
            save_safetensors(model, tmp_path, max_shard_size=size)
    with pytest.raises(TypeError, match="max_shard_size"):
        save_safetensors(model, tmp_path, max_shard_size=None)  # type: ignore[arg-type]  # meant
    with pytest.raises(TypeError, match=r"torch\.dtype"):
        save_safetensors(model, tmp_path, dtype="bf16")  # type: ignore[arg-type]  # meant
    with pytest.raises(ValueError, match="safetensors files do not have"):
        save_safetensors(nn.Linear(2, 2, dtype=torch.complex128), tmp_path)
    with pytest.raises(ValueError, match="meta device"):
        save_safetensors(nn.Linear(2, 2, device="meta"), tmp_path)
    with pytest.raises(ValueError, match="buffer_bytes"):
        SaveOptions(buffer_bytes=3)
    with pytest.raises(TypeError, match="stem"):
        SaveOptions(stem="../model")
    assert not list(tmp_path.iterdir())
