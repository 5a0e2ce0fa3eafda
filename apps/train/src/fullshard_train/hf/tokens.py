"""Text to tokens and back: by the tokenizer in a model's folder, or byte by byte.

Owns the choice, and the check that every token has a row in the model's embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from fullshard_train.errors import TrainError
from fullshard_train.hf.documents import is_held_out
from fullshard_train.hf.extra import transformers
from fullshard_train.hf.folder import ModelFolder
from fullshard_train.hf.packing import Documents
from fullshard_train.settings.sections import HFConfig

__all__ = ["Bytes", "Coder", "choose_coder", "halves", "tokenize"]

_BYTES = 256


class Coder(Protocol):
    """Text to tokens and back."""

    @property
    def name(self) -> str:
        """What its tokens are called, in the plural."""
        ...

    @property
    def end(self) -> int | None:
        """The token that ends a document, if there is one."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, as the model expects it to begin, without an end."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        ...


class Bytes:
    """A byte is a token; after the 256 there may be one that ends documents."""

    name = "bytes"

    def __init__(self, vocabulary: int) -> None:
        self.end = _BYTES if vocabulary > _BYTES else None

    def encode(self, text: str) -> list[int]:
        """UTF-8."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """UTF-8; what is none is replaced."""
        return bytes(token for token in tokens if token < _BYTES).decode(errors="replace")


class _Tokenizer:
    """The tokenizer of a folder."""

    name = "tokens"

    def __init__(self, folder: ModelFolder) -> None:
        try:
            self._inner: Any = transformers().AutoTokenizer.from_pretrained(
                folder.root, local_files_only=True
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise TrainError(
                f"model {folder.root}: its tokenizer cannot be read: {error}; mend it, or take"
                " bytes with --set hf.tokenizer=bytes"
            ) from error
        self.end: int | None = self._inner.eos_token_id

    @property
    def rows(self) -> int:
        """How many rows an embedding must have for its tokens, of which some may have no number."""
        return max(len(self._inner), 1 + max(self._inner.get_vocab().values(), default=-1))

    def encode(self, text: str) -> list[int]:
        """As the tokenizer does; an end that it adds itself is left to `tokenize`."""
        found: list[int] = self._inner(text, verbose=False)["input_ids"]
        return found[:-1] if found and found[-1] == self.end else found

    def decode(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        text: str = self._inner.decode(list(tokens), skip_special_tokens=True)
        return text


def choose_coder(section: HFConfig, folder: ModelFolder, vocabulary: int) -> Coder:
    """The tokenizer of the folder; bytes where it has none, or the config says so.

    Args:
        section: the config's.
        folder: the model's.
        vocabulary: the number of rows of the model's embedding.

    Raises:
        TrainError: the embedding has too few rows, or the tokenizer cannot be read.
    """
    if section.tokenizer == "bytes" or not folder.has_tokenizer:
        found, count = Bytes(vocabulary), _BYTES
        coder: Coder = found
    else:
        tokenizer = _Tokenizer(folder)
        coder, count = tokenizer, tokenizer.rows
    if count > vocabulary:
        raise TrainError(
            f"config hf.model = {section.model!r}: {count} {coder.name}, but the model's embedding"
            f" has {vocabulary} rows; give the tokenizer that belongs to the model, or resize it by"
            " transformers' resize_token_embeddings first"
        )
    return coder


def tokenize(texts: Sequence[str], coder: Coder, section: HFConfig) -> Documents:
    """All texts as tokens, each with the token that ends it, if there is one.

    A document of more than `hf.block` tokens is split, cut off or refused, as the config says.

    Raises:
        TrainError: one is refused, or nothing is left that has two tokens.
    """
    ended = () if coder.end is None else (coder.end,)
    found: list[torch.Tensor] = []
    for number, text in enumerate(texts):
        tokens = torch.tensor([*coder.encode(text), *ended], dtype=torch.int32)
        if len(tokens) > section.block and section.long_documents == "error":
            raise TrainError(
                f"data: document {number + 1} of {len(texts)} has {len(tokens)} {coder.name}, more"
                f" than hf.block = {section.block}: it begins {text[:40]!r}; give a larger"
                " hf.block, or hf.long_documents = 'split' or 'truncate'"
            )
        pieces = tokens.split(section.block)
        found += pieces if section.long_documents == "split" else pieces[:1]
    kept = [piece for piece in found if len(piece) > 1]
    if not kept:
        raise TrainError("data: no document has two tokens; there is nothing to predict")
    return Documents(tokens=torch.cat(kept), lengths=torch.tensor([len(piece) for piece in kept]))


def halves(documents: Documents, every: int) -> tuple[Documents, Documents]:
    """The documents to learn from, and those that are held out.

    Raises:
        TrainError: there are too few to hold one out.
    """
    count = len(documents.lengths)
    judged = torch.tensor([is_held_out(number, every) for number in range(count)])
    if not judged.any():
        raise TrainError(
            f"config data.held_out_every = {every}: holds out none of {count} documents; give more"
            " data, a smaller number, or hf.long_documents = 'split' for a few long ones"
        )
    return documents.part(~judged), documents.part(judged)
