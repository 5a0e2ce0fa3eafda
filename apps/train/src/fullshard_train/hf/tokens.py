"""Text to tokens and back: by the tokenizer in a model's folder, or byte by byte.

Owns the choice, the check that every token has a row in the model's embedding, and documents that
are longer than a row.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fullshard_train.errors import TrainError
from fullshard_train.hf.documents import Chat, Document, is_held_out
from fullshard_train.hf.extra import transformers
from fullshard_train.hf.folder import ModelFolder
from fullshard_train.hf.packing import Documents
from fullshard_train.hf.prompts import Coder, Encoded, encode
from fullshard_train.settings.sections import HFConfig

__all__ = ["Bytes", "choose_coder", "halves", "tokenize"]

_BYTES = 256
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


_NO_TEMPLATE = (
    "has messages, and they need a tokenizer with a chat template; put a"
    " chat_template.jinja into its folder, or give prompt and completion as texts"
)


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

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, open: bool) -> str:
        """There is no template."""
        raise TrainError(_NO_TEMPLATE)

    def encode_rendered(self, text: str) -> list[int]:
        """UTF-8."""
        return self.encode(text)

    def marked(self, chat: Chat) -> Encoded | None:
        """None: there is no template."""
        return None


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

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, open: bool) -> str:
        """By the chat template in the folder."""
        text: str = self._template(messages, tools, tokenize=False, add_generation_prompt=open)
        return text

    def encode_rendered(self, text: str) -> list[int]:
        """For a tokenizer without special tokens: the template wrote them."""
        found: list[int] = self._inner(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def marked(self, chat: Chat) -> Encoded | None:
        """By the template, if it has `{% generation %}`."""
        self._require_template()
        if not _MARKS.search(self._inner.get_chat_template(tools=chat.tools)):
            return None
        wanted = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._template(chat.messages, chat.tools, **wanted)
        return Encoded(list(found["input_ids"]), [each == 1 for each in found["assistant_masks"]])

    def _template(self, messages: list[dict[str, Any]], tools: Any, **wanted: bool) -> Any:
        self._require_template()
        try:
            return self._inner.apply_chat_template(messages, tools=tools, **wanted)
        except Exception as error:  # templates are programs: they raise what they like
            reason = f"{type(error).__name__}: {error}"
            raise TrainError(f"cannot be rendered by the chat template: {reason}") from error

    def _require_template(self) -> None:
        if not self._inner.chat_template:
            raise TrainError(_NO_TEMPLATE)


def choose_coder(section: HFConfig, folder: ModelFolder, vocabulary: int) -> Coder:
    """The tokenizer of the folder; bytes without a tokenizer, or if the config asks for bytes.

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


def tokenize(documents: Sequence[Document], coder: Coder, section: HFConfig) -> Documents:
    """Return all documents as tokens, each with the end token, if there is one.

    A document of more than `hf.block` tokens is split, cut off or refused, as the config asks.
    Documents without a token to learn are left out.

    Raises:
        TrainError: one is refused, or cannot be encoded, or nothing to learn is left.
    """
    tokens: list[torch.Tensor] = []
    learned: list[torch.Tensor] = []
    without = 0
    for number, document in enumerate(documents):
        try:
            whole = encode(document, coder, everything=section.learn == "all")
            pieces = _pieces(whole, coder, section)
        except TrainError as error:
            which = f"document {number + 1} of {len(documents)}"
            raise TrainError(f"data: {which} {error}; it begins {_begin(document)!r}") from error
        found = [piece for piece in pieces if any(piece.learned[1:])]
        without += any(whole.learned[1:]) and not found
        tokens += [torch.tensor(piece.tokens, dtype=torch.int32) for piece in found]
        learned += [torch.tensor(piece.learned) for piece in found]
    if not tokens:
        raise TrainError(f"data: {_nothing(without, coder, section)}; there is nothing to predict")
    if without:
        warnings.warn(
            f"data: {without} of {len(documents)} documents are left out, as their first"
            f" hf.block = {section.block} {coder.name} are all prompt",
            stacklevel=2,
        )
    lengths = torch.tensor([len(each) for each in tokens])
    return Documents(tokens=torch.cat(tokens), learned=torch.cat(learned), lengths=lengths)


def _pieces(whole: Encoded, coder: Coder, section: HFConfig) -> list[Encoded]:
    block, length = section.block, len(whole.tokens)
    if length <= block:
        return [whole]
    if section.long_documents == "error" or (
        section.long_documents == "split" and not all(whole.learned)
    ):
        has_prompt = "" if all(whole.learned) else ", and no completion is split from its prompt"
        ways = "'split' or 'truncate'" if all(whole.learned) else "'truncate'"
        raise TrainError(
            f"has {length} {coder.name}, more than hf.block = {block}{has_prompt}; give a larger"
            f" hf.block, or hf.long_documents = {ways}"
        )
    begins = range(0, length, block) if section.long_documents == "split" else range(1)
    return [Encoded(whole.tokens[at : at + block], whole.learned[at : at + block]) for at in begins]


def _nothing(without: int, coder: Coder, section: HFConfig) -> str:
    if without:
        return f"the first hf.block = {section.block} {coder.name} of documents are all prompt"
    return "no document has two tokens"


def _begin(document: Document) -> str:
    if isinstance(document, str):
        return document[:40]
    if isinstance(document, Chat):
        return str(document.messages[0].get("content"))[:40]
    return document.prompt[:40]


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
