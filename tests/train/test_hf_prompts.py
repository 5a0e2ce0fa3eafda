"""Which tokens of prompts with completions, and of chats, the task `hf` learns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard_train.errors import TrainError
from fullshard_train.hf.documents import Chat, Completed, Document, read_documents
from fullshard_train.hf.packing import Documents, Rows, pack
from fullshard_train.hf.prompts import Encoded, encode
from fullshard_train.hf.tokens import Bytes, tokenize
from fullshard_train.settings.config import load_config
from fullshard_train.settings.sections import HFConfig
from fullshard_train.task import IGNORED


class Pairs(Bytes):
    """Two letters "ab" are one token, 300; and a chat template."""

    def encode(self, text: str) -> list[int]:
        parts = text.split("ab")
        tokens = list(parts[0].encode())
        for part in parts[1:]:
            tokens += [300, *part.encode()]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("ab" if token == 300 else chr(token) for token in tokens if token != 256)

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, open: bool) -> str:
        said = [f"<{each['role'][0]}>{each['content']}." for each in messages]
        return "".join(said) + "<a>" * open


class Last(Pairs):
    """Its template says what only the last message has."""

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, open: bool) -> str:
        return super().render(messages, tools, open=open) + "!" * (not open)


class Marking(Pairs):
    """Its template marks letters of answers, here the capital ones."""

    def marked(self, chat: Chat) -> Encoded | None:
        tokens = self.encode(self.render(chat.messages, chat.tools, open=False))
        return Encoded(tokens, [chr(token).isupper() for token in tokens])


def _section(**changes: Any) -> HFConfig:
    words = [f"hf.{name}={json.dumps(value)}" for name, value in changes.items()]
    return load_config([Path("hf.toml")], words).hf


def _learned(document: Any, coder: Bytes, *, everything: bool = False) -> str:
    found = encode(document, coder, everything=everything)
    pairs = zip(found.tokens, found.learned, strict=True)
    return coder.decode([token for token, learned in pairs if learned])


def _chat(*said: str, first: int = 0) -> Chat:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    messages = [{"role": roles[each[0]], "content": each[2:]} for each in said]
    return Chat(messages, None, first)


# -- which tokens ---------------------------------------------------------------------------------


def test_the_completion_and_the_end_are_learned_and_the_prompt_is_not() -> None:
    found = encode(Completed("1+1=", "2"), Bytes(300), everything=False)
    assert found.tokens == [*b"1+1=2", 256]
    assert found.learned == [False] * 4 + [True] * 2
    assert encode(Completed("1+1=", "2"), Bytes(300), everything=True).learned == [True] * 6
    assert encode("1+1=2", Bytes(300), everything=False).learned == [True] * 6


def test_a_token_that_has_parts_of_prompt_and_completion_is_learned() -> None:
    coder = Pairs(256)
    assert _learned(Completed("1a", "b2"), coder) == "ab2"
    assert _learned(Completed("1ab", "2"), coder) == "2"


def test_of_a_chat_each_answer_is_learned_with_what_ends_it() -> None:
    chat = _chat("s:be kind", "u:hi", "a:Ho", "u:bye", "a:Bab")
    coder = Pairs(256)
    assert _learned(chat, coder) == "Ho.Bab."
    assert _learned(chat, coder, everything=True) == "<s>be kind.<u>hi.<a>Ho.<u>bye.<a>Bab."
    later = Chat(chat.messages, None, 4)
    assert _learned(later, coder) == "Bab."


def test_what_a_template_marks_is_learned_but_not_in_a_prompt_of_messages() -> None:
    chat = _chat("u:Hi", "a:Ho", "u:bye", "a:Bye")
    assert _learned(chat, Marking(256)) == "HHB"
    assert _learned(Chat(chat.messages, None, 3), Marking(256)) == "B"


def test_a_template_that_does_not_tell_where_answers_are_is_refused() -> None:
    one = _chat("u:hi", "a:Ho")
    assert _learned(one, Last(256)) == "Ho.!"
    with pytest.raises(TrainError, match=r"has 2 messages .* in another way .*'!' becomes '<u>bye"):
        _learned(_chat("u:hi", "a:Ho", "u:bye", "a:Bab"), Last(256))


def test_bytes_have_no_chat_template() -> None:
    with pytest.raises(
        TrainError, match=r"document 1 of 1 has messages, and they need a tokenizer .*'hi'"
    ):
        tokenize([_chat("u:hi", "a:Ho")], Bytes(300), _section())


# -- lines of a file ------------------------------------------------------------------------------


def _read(tmp_path: Path, *records: object) -> list[Any]:
    lines = [json.dumps(record) for record in records]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return list(read_documents(str(tmp_path), key="text"))


def test_a_line_is_a_text_a_prompt_with_its_completion_or_messages(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Ho"}
    found = _read(
        tmp_path,
        {"text": "x", "prompt": "not read", "completion": "not read"},
        {"prompt": "", "completion": "y"},
        {"messages": [user, answer], "tools": [{"name": "t"}]},
        {"prompt": [user, answer, user], "completion": [answer], "tools": []},
    )
    assert found == [
        "x",
        Completed("", "y"),
        Chat([user, answer], [{"name": "t"}], 0),
        Chat([user, answer, user, answer], None, 3),
    ]
    assert found[3].answers() == [3]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "a"}, "no text called 'text', but prompt; set .* or give messages, or prompt"),
        ({"prompt": "a", "completion": ""}, "an empty completion"),
        ({"prompt": "a", "completion": []}, "prompt is a str, completion a list; both must"),
        ({"messages": "hi"}, "a message is 'hi'; each must be an object with a role"),
        ({"messages": [{"from": "user", "value": "hi"}]}, "a message is .*'from'.* with a role"),
        ({"messages": []}, "no message of the role assistant"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no message of the role assistant"),
        (
            {"prompt": [{"role": "assistant"}], "completion": [{"role": "user"}]},
            "no message of the role assistant",
        ),
    ],
)
def test_a_line_that_is_none_of_these_is_named(
    tmp_path: Path, record: dict[str, Any], said: str
) -> None:
    with pytest.raises(TrainError, match=f"line 2: {said}"):
        _read(tmp_path, {"text": "x"}, record)


# -- rows -----------------------------------------------------------------------------------------


def test_no_completion_is_split_from_its_prompt_and_one_cut_off_is_left_out() -> None:
    documents: list[Document] = [Completed("abcdef", "gh"), Completed("a", "bcdefgh"), "ijklmnop"]
    coder = Bytes(256)
    with pytest.raises(TrainError, match=r"document 1 of 3 has 8 bytes.* and no completion is spl"):
        tokenize(documents, coder, _section(block=5, long_documents="split"))
    assert tokenize(["ijklmnop"], coder, _section(block=5, long_documents="split")).learned.all()
    with pytest.warns(
        UserWarning, match=r"1 of 3 documents are left out, as their first hf\.block"
    ):
        found = tokenize(documents, coder, _section(block=5, long_documents="truncate"))
    assert bytes(found.tokens.tolist()) == b"abcdeijklm"
    assert found.learned.tolist() == [False] + [True] * 9
    with pytest.raises(TrainError, match=r"first hf\.block = 5 bytes of documents are all prompt"):
        tokenize(documents[:1], coder, _section(block=5, long_documents="truncate"))


def _documents() -> Documents:
    """Documents of 3, 4 and 2 tokens, counted up from 1; the second one begins with a prompt."""
    learned = [True] * 3 + [False, False, True, True] + [True] * 2
    return Documents(
        tokens=torch.arange(1, 10, dtype=torch.int32),
        learned=torch.tensor(learned),
        lengths=torch.tensor([3, 4, 2]),
    )


@pytest.mark.parametrize("apart", [False, True])
def test_packed_documents_keep_what_is_learned(apart: bool) -> None:
    documents = _documents()
    members = pack([3, 4, 2], 9, apart=apart)
    rows = Rows(documents, members, block=9, padding=0, restart=not apart)
    batch = rows.batch(range(len(rows)))
    predicted = batch.targets[batch.targets != IGNORED].tolist()
    assert sorted(predicted) == [2, 3, 6, 7, 9]
    for place, token in zip(batch.inputs[..., 0].flatten(), batch.targets.flatten(), strict=True):
        assert token in (IGNORED, place + 1)
    assert rows.counted(range(len(rows))) == 5
    assert [rows.counted([row]) for row in range(len(rows))] == [
        int((batch.targets[row] != IGNORED).sum()) for row in range(len(rows))
    ]


def test_the_part_of_documents_keeps_what_is_learned() -> None:
    part = _documents().part(torch.tensor([False, True, True]))
    assert part.tokens.tolist() == [4, 5, 6, 7, 8, 9]
    assert part.learned.tolist() == [False, False, True, True, True, True]


def test_what_is_learned_is_completions_or_all() -> None:
    with pytest.raises(TrainError, match=r"hf\.learn = 'some': must be 'completions' or 'all'"):
        _section(learn="some")
