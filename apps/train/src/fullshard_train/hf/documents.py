"""The texts a run learns, document by document: from .txt and .jsonl files.

Owns reading and the split into those to learn from and those held out. Refuses to know tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from fullshard_train.errors import TrainError
from fullshard_train.text.corpus import find_files

__all__ = ["is_held_out", "read_documents"]

_KINDS = (".txt", ".jsonl")


def read_documents(source: str, *, key: str) -> list[str]:
    """The documents of a source, in the order of its files' names; empty ones are left out.

    A .jsonl file has one on each line, an object whose `key` is the text; every other file is one.

    Args:
        source: a folder (its .txt and .jsonl files, also of folders in it), a file, a glob,
            `-` (standard input, one document) or `stdlib`.
        key: the name of the text in a line of a .jsonl file.

    Raises:
        TrainError: nothing is there, or it cannot be read.
    """
    try:
        if source == "-":
            found = [sys.stdin.read()]
        else:
            found = [text for path in _files(source) for text in _documents_of(path, key)]
    except OSError as error:
        raise TrainError(f"data {error.filename or source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TrainError(f"data {source}: not UTF-8 text: {error}") from error
    kept = [text for text in found if text.strip()]
    if not kept:
        raise TrainError(f"data {source}: no text in it; give --data a folder, a file or a glob")
    return kept


def is_held_out(document: int, every: int) -> bool:
    """Whether a document is for judging: the last of every so many is."""
    return document % every == every - 1


def _files(source: str) -> list[Path]:
    folder = Path(source)
    if not folder.is_dir():
        return find_files(source)
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _KINDS and path.is_file())
    if not paths:
        raise TrainError(
            f"data {source}: no .txt or .jsonl file in this folder; give a glob for other files,"
            f" for example '{source}/**/*.md'"
        )
    return paths


def _documents_of(path: Path, key: str) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            yield _text_of(line, key, f"data {path}, line {number}")


def _text_of(line: str, key: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrainError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        raise TrainError(
            f"{where}: no text called {key!r}, but {has}; set hf.text_key to the text's name"
        )
    text: str = record[key]
    return text
