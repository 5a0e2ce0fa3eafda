"""Checkpoints from each format into each other, compared with the state dict that was saved."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from fullshard.checkpoint import async_save, save_safetensors
from fullshard.cli.converting import dcp_folders
from fullshard.cli.converting.convert import convert, open_checkpoint
from fullshard.cli.converting.entry import Checkpoint, ConvertError, Entry
from fullshard.sharding import fully_shard
from fullshard.wrappers.fsdp1 import FullyShardedDataParallel, ShardingStrategy
from support.ranks import distributed
from support.zero import write_zero

SUFFIX = {"dcp": "", "safetensors": "", "torch": ".pt"}


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embedding.weight": torch.randn(7, 3),
        "norm.bias": torch.randn(5).bfloat16(),
        "scale": torch.tensor(2.5),
        "steps": torch.tensor([3, 4], dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), 1.0]),
        "columns": torch.randn(4, 6).t(),
    }


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    """A checkpoint in a file, `a.pt`."""
    torch.save(_state(), tmp_path / "a.pt")
    return open_checkpoint(tmp_path / "a.pt")


def _read(path: Path, key: str | None = None) -> dict[str, torch.Tensor]:
    found = {each.name: each.read() for each in open_checkpoint(path, key).entries}
    assert all(each.shape == found[each.name].shape for each in open_checkpoint(path, key).entries)
    return found


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(SUFFIX, 2)])
def test_a_state_dict_survives_each_pair_of_formats(
    first: str, second: str, tmp_path: Path
) -> None:
    torch.save({"model": _state(), "step": 3}, tmp_path / "begin.pt")
    at = tmp_path / "begin.pt"
    for number, kind in enumerate((first, second)):
        target = tmp_path / f"{number}{SUFFIX[kind]}"
        done = convert(open_checkpoint(at), target, to=kind)
        assert (done.target, done.checked) == (kind, True)
        at = target
    _assert_equal(_read(at), _state())
    assert sorted(each.name for each in tmp_path.glob(".*")) == []


def test_safetensors_files_are_divided_by_size_and_read_by_the_library(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    torch.save(_state(), tmp_path / "begin.pt")
    done = convert(open_checkpoint(tmp_path / "begin.pt"), tmp_path / "weights", limit=90)
    assert len(done.files) > 2
    index = json.loads((tmp_path / "weights" / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(index["weight_map"].values()):
        found |= load_file(tmp_path / "weights" / file)
    _assert_equal(found, _state())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in _state().values())


def test_a_dtype_is_changed_for_floating_point_tensors_alone(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "begin.pt")
    source = open_checkpoint(tmp_path / "begin.pt")
    convert(source, tmp_path / "half.safetensors", dtype=torch.float16)
    expected = {n: t.half() if t.is_floating_point() else t for n, t in _state().items()}
    _assert_equal(_read(tmp_path / "half.safetensors"), expected)


@pytest.mark.parametrize(("kind", "most"), [("safetensors", 2), ("dcp", 4)])
def test_few_tensors_are_in_memory_at_once(
    kind: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcp_folders, "FILE", 3 * 4000)  # three of these tensors
    state = {f"block.{number}": torch.full((1000,), float(number)) for number in range(12)}
    torch.save(state, tmp_path / "begin.pt")
    source = open_checkpoint(tmp_path / "begin.pt")
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    counts = []

    def spied(entry: Entry) -> Entry:
        def read() -> torch.Tensor:
            tensor = entry.read().clone()
            alive.append(weakref.ref(tensor.untyped_storage()))
            counts.append(sum(each() is not None for each in alive))
            return tensor

        return dataclasses.replace(entry, read=read)

    watched = dataclasses.replace(source, entries=tuple(map(spied, source.entries)))
    convert(watched, tmp_path / "written", to=kind, check=False)
    assert len(counts) == 12
    assert max(counts) <= most
    _assert_equal(_read(tmp_path / "written"), state)


# -- checkpoints of sharded models ----------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


def _expected() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return Net().state_dict()


def _sharded() -> nn.Module:
    torch.manual_seed(1)
    model = Net()
    fully_shard(model.first)
    fully_shard(model)
    return model


def _save_async(folder: Path) -> None:
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 3}
    async_save(state, folder).result()


def _save_flat(folder: Path) -> None:
    dcp.save(dict(_sharded().state_dict()), checkpoint_id=folder)


def _save_fsdp1(folder: Path) -> None:
    torch.manual_seed(1)
    model = FullyShardedDataParallel(Net(), sharding_strategy=ShardingStrategy.FULL_SHARD)
    with FullyShardedDataParallel.state_dict_type(model, _sharded_type()):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")


def _sharded_type() -> Any:
    from fullshard.wrappers.fsdp1 import StateDictType

    return StateDictType.SHARDED_STATE_DICT


def _save_weights(folder: Path) -> None:
    save_safetensors(_sharded(), folder)


@pytest.mark.parametrize("save", [_save_async, _save_flat, _save_fsdp1, _save_weights])
@distributed(2)
def test_what_a_sharded_model_saved_is_converted_to_full_weights(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path / "saved")
    dist.barrier()
    if dist.get_rank() == 0:
        convert(open_checkpoint(tmp_path / "saved"), tmp_path / "full.pt")
        full = torch.load(tmp_path / "full.pt")
        _assert_equal(full, _expected())
        Net().load_state_dict(full)
    dist.barrier()


@distributed(2)
def test_weights_are_converted_to_a_folder_that_a_sharded_model_loads(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(_expected(), tmp_path / "full.pt")
        convert(open_checkpoint(tmp_path / "full.pt"), tmp_path / "folder", to="dcp")
    dist.barrier()
    torch.manual_seed(2)
    model = fully_shard(Net())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "folder")
    model.load_state_dict(state["model"])
    full = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in model.state_dict().items()}
    _assert_equal(full, _expected())


# -- DeepSpeed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "ranks", "sub_groups"), [(1, 3, 1), (2, 1, 1), (2, 4, 1), (3, 2, 1), (3, 3, 2)]
)
def test_a_zero_folder_is_read_as_float32_weights(
    stage: int, ranks: int, sub_groups: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    groups = [
        {"embedding.weight": torch.randn(7, 3), "head.weight": torch.randn(5, 3)},
        {"norm.weight": torch.randn(3), "scale": torch.randn(())},
    ]
    buffers, frozen = {"counts": torch.arange(4)}, {"base.weight": torch.randn(3, 3)}
    write_zero(
        tmp_path / "zero", groups, stage=stage, ranks=ranks, buffers=buffers, frozen=frozen,
        shared={"tied.weight": "embedding.weight"}, sub_groups=sub_groups,
    )  # fmt: skip
    expected = {**groups[0], **groups[1], **buffers, **frozen}
    expected["tied.weight"] = expected["embedding.weight"]
    source = open_checkpoint(tmp_path / "zero")
    assert source.format == "deepspeed"
    _assert_equal(_read(tmp_path / "zero"), expected)
    _assert_equal(_read(tmp_path / "zero" / "global_step7"), expected)
    convert(source, tmp_path / "weights")
    _assert_equal(_read(tmp_path / "weights"), expected)


def test_a_zero_folder_without_a_ranks_file_is_refused(tmp_path: Path) -> None:
    groups = [{"weight": torch.randn(4)}]
    write_zero(tmp_path, groups, stage=2, ranks=3, buffers={}, frozen={}, shared={})
    (tmp_path / "global_step7" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ConvertError, match="has 2 of 3 ranks' files; copy all files"):
        open_checkpoint(tmp_path)


class Malicious:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def test_a_zero_file_that_names_another_class_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(
        {"optimizer_state_dict": Malicious()},
        tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    )
    with pytest.raises(ConvertError, match="system, which is not loaded"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "pwned").exists()


# -- refused --------------------------------------------------------------------------------------


def test_a_part_of_a_nested_state_dict_is_chosen_by_its_key(tmp_path: Path) -> None:
    parts = {"teacher": {"w": torch.ones(1)}, "student": {"w": torch.ones(2)}}
    path = _saved(parts)(tmp_path)
    with pytest.raises(ConvertError, match="tensors under teacher, student; choose with --key"):
        open_checkpoint(path)
    with pytest.raises(ConvertError, match="has no tensors under 'pupil', and tensors under"):
        open_checkpoint(path, "pupil")
    assert _read(path, "student")["w"].numel() == 2
    assert open_checkpoint(path, "student").left_out == ("teacher.w",)


def _saved(state: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save(state, folder / "a.pt")
        return folder / "a.pt"

    return write


def _file(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def _folder_with(name: str, content: bytes) -> Callable[[Path], Path]:
    return lambda folder: _file(name, content)(folder).parent


NO_FILE = r"no file of torch\.save \(\w+Error.*; copy the file"
INDEX = "model.safetensors.index.json"
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda folder: folder / "none", "does not exist; pass the folder or file"),
    "an empty folder": (lambda folder: folder, "is no known checkpoint; pass a folder with"),
    "a broken index": (_folder_with(INDEX, b"{nope"), re.escape(INDEX)),
    "a broken name": (_folder_with("latest", b"\xff\xfe"), "cannot be read: 'utf-8' codec"),
    "a pickle": (_file("a.pt", pickle.dumps([1, 2])), r"cut short, or is no file of torch\.save"),
    "an empty file": (_file("a.pt", b""), NO_FILE),
    "a text": (_file("a.pt", b"hello"), NO_FILE),
    "a file cut short": (_file("a.safetensors", b"\xff" * 20), "cut short"),
    "one rank's flat parameters": (
        _saved({"block.flat_param": torch.ones(8)}),
        "LOCAL_STATE_DICT.*save with FULL_STATE_DICT",
    ),
    "sparse": (
        _saved({"w": torch.eye(2).to_sparse()}),
        "has a sparse tensor, w; save it as a dense",
    ),
    "meta": (_saved({"w": torch.empty(2, device="meta")}), "has a meta tensor, w"),
    "two of one name": (_saved({"3": torch.ones(1), 3: torch.ones(1)}), "has 3 twice"),
    "no tensor": (_saved({"step": 3}), "has no tensors; pass the folder or file"),
    "an object": (
        _saved({"w": nn.Linear(1, 1)}),
        r"object of torch\.nn\.modules\.linear\.Linear, and",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    make, says = REFUSED[name]
    with pytest.raises(ConvertError, match=says):
        open_checkpoint(make(tmp_path))


def test_nothing_is_overwritten_and_a_failed_write_leaves_nothing(
    source: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ConvertError, match=r"a\.pt exists; pass a folder or file"):
        convert(source, tmp_path / "a.pt")

    def fail(name: str) -> None:
        if name == "nan":
            raise OSError("no space")

    for kind in ("dcp", "safetensors"):
        with pytest.raises(ConvertError, match=r"cannot be written: .*no space"):
            convert(source, tmp_path / kind, to=kind, progress=fail)
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("kind", SUFFIX)
def test_a_tensor_that_is_read_back_and_differs_leaves_no_target(
    source: Checkpoint, kind: str, tmp_path: Path
) -> None:
    values = itertools.count()
    changing = Entry(name="w", shape=(), dtype=torch.int64, read=lambda: torch.tensor(next(values)))
    source = dataclasses.replace(source, entries=(changing,))
    with pytest.raises(ConvertError, match=r"w was read back and is not equal to that of .*a\.pt"):
        convert(source, tmp_path / f"b{SUFFIX[kind]}", to=kind)
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]


def test_a_folder_of_the_user_with_a_similar_name_stays(source: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "weights.partial").mkdir()
    convert(source, tmp_path / "weights")
    assert (tmp_path / "weights.partial").is_dir()


@pytest.mark.parametrize("kind", SUFFIX)
def test_a_target_below_a_file_is_refused(source: Checkpoint, kind: str, tmp_path: Path) -> None:
    target = tmp_path / "a.pt" / f"b{SUFFIX[kind]}"
    with pytest.raises(ConvertError, match=r"b(\.pt)? cannot be written: .*File exists"):
        convert(source, target, to=kind)


@pytest.mark.parametrize("kind", SUFFIX)
def test_a_full_disk_is_named_with_the_bytes_that_are_needed(
    source: Checkpoint, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def on_a_full_disk(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = Path("/dev/full") if "w" in mode else self
        return opened(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", on_a_full_disk)
    text = rf"device: .*b.*: {source.nbytes} bytes are to be written, and \d+ bytes and "
    with pytest.raises(ConvertError, match=f"cannot be written: .*No space left on {text}"):
        convert(source, tmp_path / f"b{SUFFIX[kind]}", to=kind)
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]


def test_a_torch_target_needs_a_suffix_by_which_it_is_recognised(
    source: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ConvertError, match=r"--to torch .*weights: use a file with a suffix \.pt"):
        convert(source, tmp_path / "weights", to="torch")
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize(("name", "to"), [("b.pt", "dcp"), ("b.safetensors", "dcp")])
def test_a_suffix_that_means_another_format_is_refused(
    source: Checkpoint, name: str, to: str, tmp_path: Path
) -> None:
    with pytest.raises(ConvertError, match=rf"--to {to} .*{name}: the suffix means "):
        convert(source, tmp_path / name, to=to)
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("kind", SUFFIX)
def test_an_interrupt_is_raised_as_one_and_leaves_no_target(
    source: Checkpoint, kind: str, tmp_path: Path
) -> None:

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / f"b{SUFFIX[kind]}", to=kind, progress=interrupt)
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]


def test_a_name_that_the_file_system_refuses_is_reported(
    source: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ConvertError, match=r"cannot be read: .*File name too long"):
        open_checkpoint(tmp_path / ("x" * 300))
    with pytest.raises(ConvertError, match=r"cannot be written: .*File name too long"):
        convert(source, tmp_path / ("x" * 300))


@pytest.mark.parametrize("kind", SUFFIX)
def test_conjugated_and_negated_views_are_written_as_their_values(
    kind: str, tmp_path: Path
) -> None:
    values = torch.randn(3, dtype=torch.complex64)
    state = {"conjugated": values.conj(), "negated": values.clone().conj().imag}
    assert state["conjugated"].is_conj() and state["negated"].is_neg()
    torch.save(state, tmp_path / "a.pt")
    convert(open_checkpoint(tmp_path / "a.pt"), tmp_path / f"b{SUFFIX[kind]}", to=kind)
    _assert_equal(_read(tmp_path / f"b{SUFFIX[kind]}"), state)


def test_a_file_in_the_format_before_torch_1_6_is_read(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    _assert_equal(_read(tmp_path / "a.pt"), _state())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_values_beside_the_weights_are_named_as_left_out(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "step": 3}, tmp_path / "a.pt")
    assert open_checkpoint(tmp_path / "a.pt").left_out == ("step",)
    dcp.save({"model": {"w": torch.ones(1), "extra": [1]}}, checkpoint_id=tmp_path / "folder")
    assert len(open_checkpoint(tmp_path / "folder").left_out) == 1
