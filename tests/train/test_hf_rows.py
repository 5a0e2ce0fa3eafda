"""The task `hf`, as far as it needs neither transformers nor peft: documents, packing, errors."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fullshard_train.cli import main
from fullshard_train.errors import TrainError
from fullshard_train.hf.documents import is_held_out, read_documents
from fullshard_train.hf.extra import require_extra
from fullshard_train.hf.folder import open_folder
from fullshard_train.hf.packing import Documents, Rows, pack
from fullshard_train.hf.tokens import Bytes, halves, tokenize
from fullshard_train.settings.config import load_config
from fullshard_train.settings.sections import HFConfig
from fullshard_train.task import IGNORED


def _section(**changes: Any) -> HFConfig:
    words = [f"hf.{name}={json.dumps(value)}" for name, value in changes.items()]
    return load_config([Path("hf.toml")], words).hf


def _documents(lengths: Sequence[int]) -> Documents:
    """Documents of these lengths, whose tokens count up from 1 through all of them."""
    tokens = torch.arange(1, sum(lengths) + 1, dtype=torch.int32)
    learned = torch.ones(len(tokens), dtype=torch.bool)
    return Documents(tokens=tokens, learned=learned, lengths=torch.tensor(lengths))


# -- documents ------------------------------------------------------------------------------------


def test_a_folder_has_a_document_per_text_file_and_per_line_of_jsonl(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("two\nlines")
    (tmp_path / "a.jsonl").write_text(
        '{"text": "x\\u2028y"}\n\n{"text": "", "n": 1}\n{"text": "z"}'
    )
    (tmp_path / "skipped.md").write_text("no")
    assert read_documents(str(tmp_path), key="text") == ["x\u2028y", "z", "two\nlines"]
    assert read_documents(f"{tmp_path}/*.md", key="text") == ["no"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"a\.jsonl, line 2: not JSON"),
        ('{"body": "x"}', r"line 2: no text called 'text', but body; set hf\.text_key"),
        ('["x"]', "line 2: no text called 'text', but list"),
        ('{"text": 3}', "line 2: no text called 'text', but text"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' + line)
    with pytest.raises(TrainError, match=said):
        read_documents(str(tmp_path), key="text")


def test_a_folder_without_texts_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"no \.txt or \.jsonl file in this folder; give a glob"):
        read_documents(str(tmp_path), key="text")
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(TrainError, match="no text in it"):
        read_documents(str(tmp_path), key="text")
    (tmp_path / "a.txt").write_bytes(b"\xff\xff")
    with pytest.raises(TrainError, match="not UTF-8 text"):
        read_documents(str(tmp_path), key="text")
    with pytest.raises(TrainError, match="no such file"):
        read_documents(str(tmp_path / "b.txt"), key="text")


# -- tokens ---------------------------------------------------------------------------------------


def test_a_document_longer_than_the_block_is_refused_split_or_cut_off() -> None:
    texts, coder = ["abcdefgh", "ij"], Bytes(300)
    section = _section(block=4, long_documents="error")
    with pytest.raises(TrainError, match=r"document 1 of 2 has 9 bytes, more than hf\.block = 4"):
        tokenize(texts, coder, section)
    split = tokenize(texts, coder, _section(block=4, long_documents="split"))
    # The last piece of the first one is the end token alone, which predicts nothing.
    assert split.lengths.tolist() == [4, 4, 3]
    assert bytes(split.tokens[:8].tolist()) == b"abcdefgh"
    cut = tokenize(texts, coder, _section(block=4, long_documents="truncate"))
    assert cut.tokens.tolist() == [*b"abcd", *b"ij", 256]


def test_without_room_for_it_no_document_has_an_end() -> None:
    found = tokenize(["ab", "c"], Bytes(256), _section(block=4))
    assert found.tokens.tolist() == [*b"ab"]
    with pytest.raises(TrainError, match="no document has two tokens"):
        tokenize(["c"], Bytes(256), _section(block=4))


def test_the_last_of_every_so_many_documents_is_held_out() -> None:
    learned, judged = halves(_documents([2, 3, 4, 5, 6, 7, 8]), 3)
    assert learned.lengths.tolist() == [2, 3, 5, 6, 8]
    assert judged.lengths.tolist() == [4, 7]
    assert judged.tokens.tolist() == [6, 7, 8, 9, *range(21, 28)]
    assert [is_held_out(number, 3) for number in range(3)] == [False, False, True]
    with pytest.raises(TrainError, match="holds out none of 7 documents"):
        halves(_documents([2] * 7), 8)


# -- packing --------------------------------------------------------------------------------------


@given(
    block=st.integers(2, 40),
    parts=st.lists(st.floats(0, 1), min_size=1, max_size=60),
    apart=st.booleans(),
)
def test_packing_places_each_document_once_and_no_row_is_too_long(
    block: int, parts: list[float], apart: bool
) -> None:
    lengths = [2 + round(part * (block - 2)) for part in parts]
    rows = pack(lengths, block, apart=apart)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in row) for row in rows]
    assert max(filled) <= block
    if apart:
        assert len(rows) == len(lengths)
    else:
        # Two rows that fit into one would have been one: at most one is half empty.
        assert sum(each <= block // 2 for each in filled) <= 1


def test_packing_takes_the_fullest_row_that_has_room() -> None:
    assert pack([5, 7, 3, 4], 10, apart=False) == [[1, 2], [0, 3]]
    rows = pack([7, 6, 4, 3], 10, apart=False)
    assert sorted(map(sorted, rows)) == [[0, 3], [1, 2]]


def test_a_packed_row_predicts_within_documents_and_counts_positions_anew() -> None:
    rows = Rows(_documents([3, 2]), [[0, 1]], block=7, padding=0, restart=True)
    batch = rows.batch([0])
    assert batch.inputs[0, :, 0].tolist() == [1, 2, 3, 4, 5, 0, 0]
    assert batch.inputs[0, :, 1].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert batch.targets[0].tolist() == [2, 3, IGNORED, 5, IGNORED, IGNORED, IGNORED]
    assert rows.counted([0]) == rows.counted([0, 0]) // 2 == 3


def test_a_row_of_one_document_counts_positions_through_its_padding() -> None:
    rows = Rows(_documents([3, 2]), [[0], [1]], block=5, padding=9, restart=False)
    batch = rows.batch([1, 0])
    assert batch.inputs[:, :, 0].tolist() == [[4, 5, 9, 9, 9], [1, 2, 3, 9, 9]]
    assert batch.inputs[:, :, 1].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert (batch.targets != IGNORED).sum().item() == rows.counted([0, 1]) == 3


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hf.base_dtype=float8", r"hf\.base_dtype = 'float8': must be 'auto', 'float32'"),
        ("hf.save_dtype=int8", r"hf\.save_dtype = 'int8': must be 'auto', 'float32'"),
        ("hf.method=dora", r"hf\.method = 'dora': must be 'full' or 'lora'"),
        ("hf.packing=some", r"hf\.packing = 'some': must be 'documents', 'crossing' or 'none'"),
        ("hf.block=1", r"hf\.block = 1: must be greater than or equal to 2"),
        ("hf.lora_rank=0", r"hf\.lora_rank = 0: must be greater than or equal to 1"),
        ("hf.lora_dropout=1.0", r"hf\.lora_dropout = 1\.0: must be less than 1"),
        ("hf.lora_targets=a,,b", r"hf\.lora_targets = 'a,,b': must be all-linear, or names"),
        ("hf.max_shard_size=large", r"hf\.max_shard_size = 'large': must be a size"),
    ],
)
def test_a_setting_out_of_range_is_refused(override: str, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        load_config([Path("hf.toml")], [override])


def _write_config(folder: Path, **table: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **table}))


def test_a_model_that_is_not_there_or_not_whole_is_refused(tmp_path: Path) -> None:
    for model, said in (
        ("", r"hf\.model = '': give the folder of a model"),
        ("meta-llama/Llama-3.2-1B", "no such folder; give a folder that is here"),
        (str(tmp_path), r"no config\.json in it"),
    ):
        with pytest.raises(TrainError, match=said):
            open_folder(_section(model=model))
    _write_config(tmp_path)
    with pytest.raises(TrainError, match=r"no index of several, but no weights; .*weights=random"):
        open_folder(_section(model=str(tmp_path)))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(TrainError, match=r"but pytorch_model\.bin; save it by"):
        open_folder(_section(model=str(tmp_path)))
    assert open_folder(_section(model=str(tmp_path), weights="random")).weights is None
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40))
    with pytest.raises(TrainError, match=r"model\.safetensors: .*; download it again"):
        open_folder(_section(model=str(tmp_path)))


def test_quantized_weights_and_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    _write_config(tmp_path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(TrainError, match=r"its weights are quantized \(gptq\)"):
        open_folder(_section(model=str(tmp_path)))
    _write_config(tmp_path, dtype="float64")
    with pytest.raises(TrainError, match="dtype = 'float64': must be one of float32"):
        open_folder(_section(model=str(tmp_path), weights="random"))
    _write_config(tmp_path)
    save_file({"a": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(TrainError, match="its weights are I8; float32, bfloat16 and float16 can"):
        open_folder(_section(model=str(tmp_path)))


def test_the_stored_dtype_is_that_of_most_elements(tmp_path: Path) -> None:
    _write_config(tmp_path)
    values = {"a": torch.zeros(4), "b": torch.zeros(9, dtype=torch.bfloat16)}
    save_file(values, tmp_path / "model.safetensors")
    found = open_folder(_section(model=str(tmp_path)))
    assert found.stored is torch.bfloat16
    assert not found.has_tokenizer
    first = found.fingerprint()
    save_file({**values, "a": torch.ones(4)}, tmp_path / "model.safetensors")
    assert found.fingerprint() != first


@pytest.mark.parametrize("lacking", ["transformers", "peft"])
def test_a_library_that_is_missing_is_named_with_what_installs_it(
    lacking: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        if name == lacking:
            return None
        return object() if name in ("transformers", "peft") else real(name, package)

    with mock.patch.object(importlib.util, "find_spec", without):
        with pytest.raises(TrainError, match=f"{lacking} is not installed; pip install 'fullshard"):
            require_extra("transformers", "peft")
        words = ["--config", "hf.toml", "--set", "hf.method=lora", "--out", str(tmp_path / "run")]
        assert main(words) == 2
    assert f"'hf': {lacking} is not installed; pip install" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
