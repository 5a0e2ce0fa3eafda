"""Corpora: where bytes come from and which are held out."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard_train.errors import TrainError
from fullshard_train.settings.sections import DataConfig
from fullshard_train.text.corpus import Corpus, read_source, split


def _split(data: bytes, *, block_bytes: int, held_out_every: int) -> Corpus:
    config = DataConfig(source="-", block_bytes=block_bytes, held_out_every=held_out_every)
    return split(torch.tensor(list(data), dtype=torch.uint8), config)


def _bytes(data: torch.Tensor) -> bytes:
    return bytes(data.tolist())


def test_the_standard_library_gives_megabytes_of_source_the_same_each_time() -> None:
    first = read_source("stdlib")
    assert len(first) > 5_000_000
    assert b"def namedtuple(" in first
    assert read_source("stdlib") == first


def test_files_of_a_glob_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_bytes(b"B")
    (tmp_path / "a.txt").write_bytes(b"A")
    (tmp_path / "deep" / "c.txt").write_bytes(b"C")
    assert read_source(str(tmp_path / "*.txt")) == b"A\nB"
    assert read_source(str(tmp_path / "**" / "*.txt")) == b"A\nB\nC"
    assert read_source(str(tmp_path / "b.txt")) == b"B"


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"typed")))
    assert read_source("-") == b"typed"


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(TrainError, match=r"empty\.txt: no bytes in it"):
        read_source(str(tmp_path / "empty.txt"))
    with pytest.raises(TrainError, match=r"gone\.txt: no such file"):
        read_source(str(tmp_path / "gone.txt"))
    with pytest.raises(TrainError, match="is a folder; give a glob"):
        read_source(str(tmp_path))


def test_the_last_block_of_every_period_is_held_out() -> None:
    corpus = _split(b"aabbccddeeff", block_bytes=2, held_out_every=3)
    assert _bytes(corpus.train) == b"aabbddee"
    assert _bytes(corpus.held_out) == b"ccff"


def test_a_last_block_that_is_not_full_is_learned_from() -> None:
    corpus = _split(b"aabbccd", block_bytes=2, held_out_every=3)
    assert _bytes(corpus.train) == b"aabbd"
    assert _bytes(corpus.held_out) == b"cc"


def test_a_text_of_too_few_blocks_has_smaller_ones_and_four_are_held_out() -> None:
    data = bytes(range(240))
    corpus = _split(data, block_bytes=65536, held_out_every=10)
    assert corpus.block_bytes == 6
    assert _bytes(corpus.held_out) == b"".join(data[end - 6 : end] for end in (60, 120, 180, 240))
    assert _split(data, block_bytes=24, held_out_every=10).block_bytes == 24  # just enough


@given(st.integers(1, 60), st.integers(2, 6), st.integers(1, 20))
def test_a_part_is_held_out_of_any_text_that_has_a_byte_for_each_block_of_a_period(
    length: int, held_out_every: int, block_bytes: int
) -> None:
    corpus = _split(bytes(length), block_bytes=block_bytes, held_out_every=held_out_every)
    assert bool(len(corpus.held_out)) == (length >= held_out_every)


@given(
    data=st.binary(min_size=1, max_size=200),
    block_bytes=st.integers(1, 20),
    held_out_every=st.integers(2, 6),
)
def test_every_byte_is_in_exactly_one_part(
    data: bytes, block_bytes: int, held_out_every: int
) -> None:
    corpus = _split(data, block_bytes=block_bytes, held_out_every=held_out_every)
    together = _bytes(corpus.train) + _bytes(corpus.held_out)
    assert sorted(together) == sorted(data)


def test_the_fingerprint_tells_bytes_and_splits_apart() -> None:
    known = {
        _split(data, block_bytes=size, held_out_every=every).fingerprint
        for data in (b"abcdef", b"abcdeg")
        for size in (1, 2)
        for every in (2, 3)
    }
    assert len(known) == 8
    again = _split(b"abcdef", block_bytes=1, held_out_every=2).fingerprint
    assert again in known
