"""A document as tokens, and which of them are to be learned: the completion, not the prompt.

Finds the end of a prompt in tokens, and the answers in a chat. A prompt ends where its own tokens
differ from the tokens of the whole document, so a token that spans both is learned. In a chat, the
completion is the text that the template writes for an answer, between the text to continue and the
next text; or what it marks itself by ``{% generation %}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from fullshard_train.errors import TrainError
from fullshard_train.hf.documents import Chat, Document

__all__ = ["Coder", "Encoded", "encode"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a document, and of each whether it is to be predicted."""

    tokens: list[int]
    learned: list[bool]


class Coder(Protocol):
    """Text to tokens and back."""

    @property
    def name(self) -> str:
        """The name of its tokens, in the plural."""
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

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, open: bool) -> str:
        """The text of a chat template for messages; `open` lets an answer begin after them.

        Raises:
            TrainError: there is no template, or it refuses the messages.
        """
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of what `render` gave; it has a beginning and ends already."""
        ...

    def marked(self, chat: Chat) -> Encoded | None:
        """A chat by a template that marks answers itself; None if it does not.

        Raises:
            TrainError: as `render`.
        """
        ...


def encode(document: Document, coder: Coder, *, everything: bool) -> Encoded:
    """The tokens of a document, with the one that ends it, if there is one.

    The template defines the end of a chat.

    Args:
        document: a text, of which all is learned, or one that has a prompt.
        coder: the tokenizer.
        everything: prompts are learned, too.

    Raises:
        TrainError: a chat has no template, or one that does not tell where answers are.
    """
    if isinstance(document, Chat):
        if everything:
            text = coder.render(document.messages, document.tools, open=False)
            return _learned_from(0, coder.encode_rendered(text))
        return _marked(document, coder) or _between(document, coder)
    ended = [] if coder.end is None else [coder.end]
    if isinstance(document, str):
        return _learned_from(0, [*coder.encode(document), *ended])
    whole = coder.encode(document.prompt + document.completion)
    prompt = 0 if everything else _common(coder.encode(document.prompt), whole)
    return _learned_from(prompt, [*whole, *ended])


def _learned_from(first: int, tokens: list[int]) -> Encoded:
    return Encoded(tokens, [place >= first for place in range(len(tokens))])


def _common(first: Sequence[object], second: Sequence[object]) -> int:
    """How many tokens, or letters, both begin with."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _marked(chat: Chat, coder: Coder) -> Encoded | None:
    found = coder.marked(chat)
    if found is None or chat.first == 0:
        return found
    prompt = coder.encode_rendered(coder.render(chat.messages[: chat.first], chat.tools, open=True))
    first = _common(prompt, found.tokens)
    learned = [each and place >= first for place, each in enumerate(found.learned)]
    return Encoded(found.tokens, learned)


def _between(chat: Chat, coder: Coder) -> Encoded:
    text = coder.render(chat.messages, chat.tools, open=False)
    tokens = coder.encode_rendered(text)
    learned = [False] * len(tokens)

    def place(count: int, *, open: bool) -> int:
        part = coder.render(chat.messages[:count], chat.tools, open=open)
        if not text.startswith(part):
            raise TrainError(
                f"has {count} messages that the chat template writes in another way once more"
                f" follows ({_difference(part, text)}), so it does not tell where answers are; give"
                " the tokenizer a template that marks them by {% generation %}, or set hf.learn ="
                " 'all'"
            )
        return _common(coder.encode_rendered(part), tokens)

    for number in chat.answers():
        begin, end = place(number, open=True), place(number + 1, open=False)
        learned[begin:end] = [True] * (end - begin)
    return Encoded(tokens, learned)


def _difference(part: str, text: str) -> str:
    at = _common(part, text)
    return f"{part[at : at + 20]!r} becomes {text[at : at + 20]!r}"
