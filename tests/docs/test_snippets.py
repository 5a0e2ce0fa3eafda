"""Every Python snippet of the documentation runs, in order, and prints what its page says.

A comment in a page says how the snippets after it run, until the next such comment:

    <!-- snippets: ranks=2 -->                 one program, on 2 ranks of the pool, in one namespace
    <!-- snippets: ranks=2 after=index.md -->  the same, after the first program of another page
    <!-- snippets: torchrun=2 -->              one file, started by torchrun; on 1 rank if it needs
                                               no other

Snippets before any comment are one program on 2 ranks; so none can be skipped. A ```text block
titled "Output" is compared with what rank 0 printed in the program since the Output before it;
`...` stands for anything within a line. One titled "Output (numbers vary)" is compared but for its
numbers. Several ranks under torchrun, whose prints mix, have one Output at most. Some of them run
on the pool in ``tests``, which starts no processes, and under torchrun in the matrix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from markdown_it import MarkdownIt

from support.members import MEMBERS, ROOT
from support.ranks import run_on_ranks

# comm's own README is run by tests/comm: it must hold without the layers above.
READMES = [
    ROOT / name / "README.md"
    for name in (".", "packages/wire", "packages/sharding", "packages/policies")
]
READMES += [
    ROOT / "packages" / name / "README.md"
    for name in ("insight", "checkpoint", "optim", "preflight", "elastic", "wrappers")
]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *READMES])
# Pages whose programs plan large models, simulate many steps or train for long.
_LONG_NAMES = ("how-to/plan", "how-to/races", "tutorial", "tutorial-plan")
_LONG = [ROOT / "docs" / f"{each}.md" for each in _LONG_NAMES]


# Pages whose programs under torchrun run on the pool in `tests`.
_ON_THE_POOL = [ROOT / "README.md", ROOT / "docs" / "how-to" / "meshes.md"]


def _title(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Fences may be indented by any number of blanks, as in the admonitions and lists of mkdocs.
_MARKDOWN = MarkdownIt().disable("code")
_COMMENT = re.compile(r"<!-- snippets: (?P<settings>.*) -->")
_OTHER_LANGUAGES = {"console", "ini", "mermaid", "sh", "text", "toml"}
_OUTPUT = 'text title="Output"'
_VARYING = 'text title="Output (numbers vary)"'
_MARK = "---- an Output is shown here ----"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page: what follows its fence, its text, and its first line's number."""

    info: str
    text: str
    line: int

    @property
    def language(self) -> str:
        return self.info.split(" ", 1)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The snippets after one comment, and the outputs that the page shows among them."""

    page: Path
    settings: dict[str, str]
    blocks: list[Block]

    def snippets(self) -> list[Block]:
        return [block for block in self.blocks if block.language == "python"]

    def __str__(self) -> str:
        return f"{_title(self.page)}:{self.blocks[0].line}"


def _read(page: Path) -> Iterator[Block | dict[str, str]]:
    """The fenced blocks and the comments of a page, in order."""
    for token in _MARKDOWN.parse(page.read_text()):
        comment = _COMMENT.fullmatch(token.content.strip()) if token.type == "html_block" else None
        if comment:
            yield dict(setting.split("=") for setting in comment["settings"].split())
        elif token.type == "fence":
            assert token.map is not None, "a block has lines"
            yield Block(info=token.info.strip(), text=token.content, line=token.map[0] + 2)


def _programs(page: Path) -> list[Program]:
    programs = [Program(page=page, settings={"ranks": "2"}, blocks=[])]
    for item in _read(page):
        if isinstance(item, dict):
            programs.append(Program(page=page, settings=item, blocks=[]))
        elif item.language == "python" or item.info in (_OUTPUT, _VARYING):
            programs[-1].blocks.append(item)
    return [program for program in programs if program.blocks]


PROGRAMS = [program for page in PAGES for program in _programs(page)]


def _execute(blocks: list[Block], page: str, folder: Path) -> list[str]:
    """Runs on a rank: the snippets in one namespace; what was printed before each Output."""
    os.chdir(folder)
    module = types.ModuleType("snippets")
    sys.modules["snippets"] = module  # dataclasses look their module up
    printed, outputs = io.StringIO(), []
    try:
        with contextlib.redirect_stdout(printed):
            for block in blocks:
                if block.language == "python":
                    # As many lines before it as in the page: a traceback names the page's line.
                    source = "\n" * (block.line - 1) + block.text
                    exec(compile(source, page, "exec", dont_inherit=True), vars(module))
                else:
                    outputs.append(printed.getvalue())
                    printed.truncate(printed.seek(0))
    finally:
        del sys.modules["snippets"]
    return outputs


def _run_on_pool(program: Program, folder: Path) -> list[str]:
    blocks = list(program.blocks)
    if "after" in program.settings:
        first = _programs(program.page.parent / program.settings["after"])[0]
        assert first.settings.keys() == {"ranks"}
        blocks = first.snippets() + blocks
    ranks = int(program.settings["ranks"])
    return run_on_ranks(_execute, ranks, blocks, str(program.page), folder, job_timeout=120)[0]


def _execute_as_launched(blocks: list[Block], page: str, folder: Path) -> list[str]:
    """Runs on a rank: as ``_execute``; the program's process group is the pool's."""
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        return _execute(blocks, page, folder)


def _run_as_launched(program: Program, folder: Path) -> list[str]:
    ranks = int(program.settings["torchrun"])
    page = str(program.page)
    every = run_on_ranks(_execute_as_launched, ranks, program.blocks, page, folder, job_timeout=120)
    return every[0]


def _run_with_torchrun(program: Program, folder: Path) -> list[str]:
    script = folder / "script.py"
    shown = sum(block.language == "text" for block in program.blocks)
    mark = f"print({_MARK!r})\n" if shown > 1 else ""
    texts = [each.text if each.language == "python" else mark for each in program.blocks]
    script.write_text("\n".join(texts))
    sources = [str(member.folder / "src") for member in MEMBERS]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sources),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error",
        "CUDA_VISIBLE_DEVICES": "",  # two ranks, whatever the number of cards
    }
    ranks = program.settings["torchrun"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*launch, f"--nproc-per-node={ranks}", script.name],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split(f"{_MARK}\n")[:shown] if mark else [result.stdout]


def _is_shown(block: Block, printed: str) -> bool:
    """Whether ``block`` is what was ``printed``, but for blanks at the ends of lines."""
    lines = "\n".join(re.escape(line.rstrip()) for line in block.text.rstrip().splitlines())
    pattern = lines.replace(r"\.\.\.", ".*")
    if block.info == _VARYING:
        pattern = re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", pattern)
        # A column, and the rule under it, are as wide as the numbers.
        pattern = re.sub(r"(\\ )+", r" +", re.sub(r"(\\-)+", r"-+", pattern))
    said = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
    return re.fullmatch(pattern, said) is not None


def _cases() -> Iterator[Any]:
    """Each page, and what runs its programs under torchrun."""
    for page in filter(_programs, PAGES):
        pooled = page in _ON_THE_POOL
        marks = [pytest.mark.matrix] if pooled or page in _LONG else []
        title = f"{_title(page)} under torchrun" if pooled else _title(page)
        yield pytest.param(page, _run_with_torchrun, marks=marks, id=title)
        if pooled:
            yield pytest.param(page, _run_as_launched, id=_title(page))


@pytest.mark.parametrize(("page", "launch"), [*_cases()])
def test_the_snippets_of_a_page_run_and_print_what_it_shows(
    page: Path, launch: Callable[[Program, Path], list[str]], tmp_path: Path
) -> None:
    for program in _programs(page):  # in one folder: one program may read what another wrote
        run = launch if "torchrun" in program.settings else _run_on_pool
        outputs = run(program, tmp_path)
        shown = [block for block in program.blocks if block.language == "text"]
        for block, printed in zip(shown, outputs, strict=True) if shown else ():
            where = f"{page}:{block.line}"
            assert _is_shown(block, printed), f"{where} shows\n{block.text}\nbut:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=_title)
def test_no_snippet_of_a_page_is_left_out(page: Path) -> None:
    fences = re.findall(r"(?m)^ *(?:```+|~~~+)(python|py\b|pycon|{ *\.?py)", page.read_text())
    run = sum(len(program.snippets()) for program in PROGRAMS if program.page == page)
    assert len(fences) == run
    languages = {item.language for item in _read(page) if isinstance(item, Block)}
    assert languages <= _OTHER_LANGUAGES | {"python"}, "a block without a known language"


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_says_how_it_runs_in_known_words(program: Program) -> None:
    assert program.snippets(), "an output without a snippet"
    how = program.settings.keys() - {"after"}
    assert how in ({"ranks"}, {"torchrun"})
    assert all(program.settings[key] in ("1", "2", "4") for key in how)
    if "torchrun" in how:
        assert "after" not in program.settings
        shown = sum(block.language == "text" for block in program.blocks)
        assert shown <= 1 or program.settings["torchrun"] == "1", "ranks' prints mix"


def test_a_snippet_that_prints_something_else_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- snippets: ranks=2 -->\n```python\nprint('one', 1.25)\n```\n"
        '```text title="Output"\none ...\n```\n'
    )
    (program,) = _programs(page)
    (printed,) = _run_on_pool(program, tmp_path)
    shown = program.blocks[1]
    assert _is_shown(shown, printed)
    assert not _is_shown(dataclasses.replace(shown, text="two ...\n"), printed)
    assert not _is_shown(dataclasses.replace(shown, text="one 1.5\n"), printed)
    assert _is_shown(dataclasses.replace(shown, text="one 1.5\n", info=_VARYING), printed)


def test_a_snippet_runs_on_every_rank_of_its_program(tmp_path: Path) -> None:
    code = Block(info="python", text="import torch.distributed as d; print(d.get_rank())\n", line=7)
    shown = Block(info=_OUTPUT, text="0\n", line=11)
    printed = run_on_ranks(_execute, 2, [code, shown], "page.md", tmp_path)
    assert printed == [["0\n"], ["1\n"]]
