"""The text a run learns: where its bytes come from, and which of them are held out.

Owns reading (this Python's standard library, files, standard input) and the split. Refuses to know
about ranks: one rank reads, and `fullshard_train.ranks.distributed` sends the bytes to the other
    ranks, so that all hold one corpus by construction, also if hosts differ.
"""

from __future__ import annotations

import glob
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fullshard_train.errors import TrainError
from fullshard_train.settings.sections import DataConfig

__all__ = ["Corpus", "find_files", "read_source", "split"]

# Tests are two thirds of the standard library, and much of them is generated data.
_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)

_HELD_OUT_BLOCKS = 4  # of a short text: from places all over the text, each as long as possible


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Bytes to learn from and bytes to be judged on, both uint8 of shape `[length]`.

    `fingerprint` is the same for two corpora only if their bytes and their split are. `block_bytes`
    is the size of the blocks, which is smaller than the configured one for a short text.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    fingerprint: str
    block_bytes: int


def read_source(source: str) -> bytes:
    """The bytes of a source: `stdlib`, `-` (standard input), a file or a glob (`**`: folders).

    Several files come in the order of their names, joined by a newline.

    Raises:
        TrainError: nothing is there, or it cannot be read, or it is empty.
    """
    try:
        if source == "-":
            data = sys.stdin.buffer.read()
        else:
            data = b"\n".join(path.read_bytes() for path in find_files(source))
    except OSError as error:
        raise TrainError(f"data {error.filename or source}: {error.strerror or error}") from error
    if not data:
        raise TrainError(
            f"data {source}: no bytes in it; give --data a file, a glob or - (standard input)"
        )
    return data


def find_files(source: str) -> list[Path]:
    """The files of `stdlib`, a name or a glob, in the order of their names.

    Raises:
        TrainError: there are none.
    """
    if source == "stdlib":
        return list(_standard_library())
    if Path(source).is_dir():
        raise TrainError(
            f"data {source}: is a folder; give a glob, for example '{source}/**/*.txt'"
        )
    paths = [
        Path(name) for name in sorted(glob.glob(source, recursive=True)) if Path(name).is_file()
    ]
    if not paths:
        raise TrainError(
            f"data {source}: no such file; give a file, a glob, - (standard input) or stdlib"
        )
    return paths


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    for name in sorted(names, key=lambda name: name.parts):
        if _SKIPPED.isdisjoint(name.parts):
            yield root / name


def split(data: torch.Tensor, config: DataConfig) -> Corpus:
    """The corpus with the last of every `held_out_every` blocks of `block_bytes` held out.

    A last, shorter block belongs to the training part. The remaining blocks are joined, so a few
    windows span a seam. A text without `held_out_every` full blocks would have no held-out part:
    its blocks are smaller, so that `_HELD_OUT_BLOCKS` of them are held out.

    Args:
        data: uint8, shape `[bytes]`.
        config: the block size and the rhythm.
    """
    size, period = config.block_bytes, config.held_out_every
    if len(data) < size * period:
        size = max(1, len(data) // (period * _HELD_OUT_BLOCKS))
    blocks = torch.split(data, size)
    kept: list[torch.Tensor] = []
    held_out: list[torch.Tensor] = []
    for index, block in enumerate(blocks):
        last_of_period = index % period == period - 1
        (held_out if last_of_period and len(block) == size else kept).append(block)
    digest = hashlib.sha256(f"{size} {period} {len(data)} ".encode())
    digest.update(data.numpy().tobytes())
    return Corpus(
        train=torch.cat(kept),
        held_out=torch.cat(held_out) if held_out else data[:0],
        fingerprint=digest.hexdigest(),
        block_bytes=size,
    )
