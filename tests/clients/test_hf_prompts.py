"""Prompts and chats of the task `hf`: the tokens and masks of TRL, and plain transformers' losses.

Run by ``nox -s clients``. Tiny models of random weights; nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fullshard_train.cli import main
from fullshard_train.hf.documents import read_documents
from fullshard_train.hf.folder import open_folder
from fullshard_train.hf.prompts import encode
from fullshard_train.hf.tokens import choose_coder
from support.hf import make_folder, make_tokenizer, settings_of
from support.ranks import run_on_ranks
from support.trainer.hf_beside import compare, reference
from support.trainer.jobs import Ran, run, settings, small_config

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what libraries say of their own parts
]

_TEMPLATE = (
    "<s>{% for message in messages %}{% if message.role == 'assistant' %}"
    "[a]{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}[{{ message.role[0] }}]{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
_PLAIN = _TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def _said(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def _records(kind: str) -> list[dict[str, Any]]:
    if kind == "texts":
        return [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}." * (1 + n % 4)} for n in range(40)]
    sums = [_said(f"{n}+{n}?", f"{2 * n}", "+1?", f"{2 * n + 1}.") for n in range(40)]
    if kind == "chats":
        return [{"messages": messages} for messages in sums]
    return [{"prompt": each[:3], "completion": each[3:]} for each in sums]


def _folder(tmp_path: Path, kind: str, template: str = _PLAIN, **options: Any) -> Path:
    """A tiny model with a tokenizer, and beside it data of a kind."""
    lines = [json.dumps(record) + "\n" for record in _records(kind)]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    folder = make_folder(tmp_path / "base", "llama", **options)
    make_tokenizer(folder, template=template)
    return folder


def _ours(folder: Path, *, everything: bool = False) -> list[tuple[list[int], list[int]]]:
    section = small_config(**settings_of(folder, folder.parent / "data.jsonl")).hf
    coder = choose_coder(section, open_folder(section), 300)
    found = read_documents(str(folder.parent / "data.jsonl"), key="text")
    encoded = [encode(document, coder, everything=everything) for document in found]
    return [
        (
            each.tokens,
            [t if learned else -100 for t, learned in zip(each.tokens, each.learned, strict=True)],
        )
        for each in encoded
    ]


def _of_trl(folder: Path, **options: Any) -> list[tuple[list[int], list[int]]]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    lines = (folder.parent / "data.jsonl").read_text().splitlines()
    trainer = SFTTrainer(
        model=str(folder),
        args=SFTConfig(
            str(folder.parent / "trl"), use_cpu=True, report_to=[], bf16=False, **options
        ),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    found = []
    for example in trainer.train_dataset:
        batch = trainer.data_collator([example])
        found.append((batch["input_ids"][0].tolist(), batch["labels"][0].tolist()))
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("texts", {}),
        ("chats", {"assistant_only_loss": True}),
        ("prompts of messages", {}),
    ],
)
def test_tokens_and_what_is_learned_of_them_are_trls(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    pytest.importorskip("trl")
    folder = _folder(tmp_path, kind, _TEMPLATE)
    assert _ours(folder) == _of_trl(folder, **options)


@pytest.mark.parametrize("kind", ["chats", "prompts of messages"])
def test_a_template_without_marks_gives_what_one_with_marks_does(tmp_path: Path, kind: str) -> None:
    marked = _ours(_folder(tmp_path, kind, _TEMPLATE))
    found = _ours(_folder(tmp_path, kind, _PLAIN))
    assert found == marked
    assert _ours(tmp_path / "base", everything=True) == [(tokens, tokens) for tokens, _ in found]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("packing", ["documents", "none"])
@pytest.mark.parametrize("kind", ["texts", "chats"])
def test_only_completions_are_learned_as_by_plain_transformers_with_masked_labels(
    tmp_path: Path, kind: str, packing: str, world_size: int
) -> None:
    folder = _folder(tmp_path, kind)
    sections = settings_of(folder, tmp_path / "data.jsonl", packing=packing)
    train = {"steps": 4, "accumulate": world_size}
    config = small_config(**sections, train=train)
    ran: list[Ran] = run_on_ranks(run, world_size, config, tmp_path / "run")
    compare(ran[0], reference(config), exact=world_size == 1)
    everything = small_config(**settings_of(folder, tmp_path / "data.jsonl", learn="all"))
    assert reference(everything).losses != reference(config).losses


def test_the_command_line_says_how_much_is_prompt_and_a_wrong_template_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(tmp_path, "chats")
    words = settings(**settings_of(folder, tmp_path / "data.jsonl"))
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert " of them in prompts) to learn from" in capfd.readouterr().out
    assert main(["sample", str(tmp_path / "run"), "--prompt", "1+1?", "--chat", "true"]) == 0
    assert capfd.readouterr().out.startswith("[u]1+1?[a]")
    words += ["--set", "sample.chat=true"]
    for template, said in (
        ("", "sample.chat = true: the prompt has messages, and they need a tokenizer with a chat"),
        ("{{ raise_exception('no') }}", "the prompt cannot be rendered .*TemplateError: no"),
    ):
        make_tokenizer(folder, template=template)
        assert main([*words, "--out", str(tmp_path / "again")]) == 2
        error = capfd.readouterr().err.splitlines()[-1]
        assert re.search(said, error), error
    words = words[:-2]
    for template, said in (
        ("", "and they need a tokenizer with a chat template"),
        ("{{ raise_exception('no') }}", "document 1 of 40 cannot be rendered .*TemplateError: no"),
        (_PLAIN + "{% if not add_generation_prompt %}!{% endif %}", "'!' becomes"),
    ):
        make_tokenizer(folder, template=template)
        assert main([*words, "--out", str(tmp_path / "again")]) == 2
        error = capfd.readouterr().err.splitlines()[-1]
        assert re.search(said, error), error
    assert not (tmp_path / "again").exists()
