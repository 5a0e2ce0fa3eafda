"""The documents a run learns: texts, prompts with completions, chats; from .txt and .jsonl files.

Owns reading and the split into those to learn from and those held out. Refuses to know tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fullshard_train.errors import TrainError
from fullshard_train.text.corpus import find_files

__all__ = ["Chat", "Completed", "Document", "is_held_out", "read_documents"]

_KINDS = (".txt", ".jsonl")


@dataclass(frozen=True, slots=True)
class Completed:
    """A prompt and the completion that a model is to write after it."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for a chat template, `{"role": ..., "content": ...}`.

    The model is to write those of the role "assistant", from message number `first` on. `tools` are
    handed to the template, if there are some.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    first: int

    def answers(self) -> list[int]:
        """The numbers of the messages that the model is to write."""
        roles = [message["role"] for message in self.messages]
        return [at for at, role in enumerate(roles) if role == "assistant" and at >= self.first]


Document: TypeAlias = str | Completed | Chat


def read_documents(source: str, *, key: str) -> list[Document]:
    """The documents of a source, in the order of its files' names; empty texts are left out.

    A .jsonl file has one on each line: an object whose `key` is the text; or with "messages"; or
    with "prompt" and "completion", which are texts or both messages. Every other file is a text.

    Args:
        source: a folder (its .txt and .jsonl files, also of folders in it), a file, a glob,
            `-` (standard input, one document) or `stdlib`.
        key: the name of the text in a line of a .jsonl file.

    Raises:
        TrainError: nothing is there, or it cannot be read.
    """
    try:
        if source == "-":
            found: list[Document] = [sys.stdin.read()]
        else:
            found = [each for path in _files(source) for each in _documents_of(path, key)]
    except OSError as error:
        raise TrainError(f"data {error.filename or source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TrainError(f"data {source}: not UTF-8 text: {error}") from error
    kept = [each for each in found if not isinstance(each, str) or each.strip()]
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


def _documents_of(path: Path, key: str) -> Iterator[Document]:
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            yield _document_in(line, key, f"data {path}, line {number}")


def _document_in(line: str, key: str, where: str) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TrainError(f"{where}: not JSON: {error}") from error
    if isinstance(record, dict):
        if isinstance(record.get(key), str):
            text: str = record[key]
            return text
        if "messages" in record:
            return _chat(record["messages"], [], record, where)
        if "prompt" in record and "completion" in record:
            return _completed(record, where)
    has = ", ".join(record) if isinstance(record, dict) else type(record).__name__
    raise TrainError(
        f"{where}: no text called {key!r}, but {has}; set hf.text_key to the text's name, or give"
        " messages, or prompt and completion"
    )


def _completed(record: Mapping[str, Any], where: str) -> Document:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise TrainError(f"{where}: an empty completion; there is nothing to learn")
        return Completed(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat(completion, prompt, record, where)
    raise TrainError(
        f"{where}: prompt is a {type(prompt).__name__}, completion a {type(completion).__name__};"
        " both must be texts, or both lists of messages"
    )


def _chat(said: object, before: list[Any], record: Mapping[str, Any], where: str) -> Chat:
    messages: list[Any] = [*before, *said] if isinstance(said, list) else [said]
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TrainError(
                f"{where}: a message is {str(message)[:40]!r}; each must be an object with a role"
                ' and a content, such as {"role": "user", "content": "Hello"}'
            )
    chat = Chat(messages, record.get("tools") or None, len(before))
    if not chat.answers():
        raise TrainError(f"{where}: no message of the role assistant; there is nothing to learn")
    return chat
