"""The parser of command lines: versions, no abbreviations, and what was probably meant."""

from __future__ import annotations

import pytest

from fullshard.comm.spi import CommandParser


def _parser() -> CommandParser:
    parser = CommandParser(prog="tool", version="1.2.3")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--mesh", choices=("flat", "deep"))
    run.add_argument("--steps", type=int)
    return parser


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run --mehs flat", "tool run: error: unrecognized arguments: --mehs flat; did you mean"),
        ("run --mehs=flat", "did you mean --mesh?"),
        ("run --step 3", "did you mean --steps?"),  # no abbreviation: a later option may have it
        ("run --mesh falt", "did you mean flat?"),
        ("rnu", "did you mean run?"),
        ("run --zzz 3", "unrecognized arguments: --zzz 3\n"),
        ("run --steps three", "invalid int value: 'three'\n"),
    ],
)
def test_a_mistyped_word_is_an_error_that_names_what_is_close(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_version_names_the_command_and_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _parser().parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("tool 1.2.3, torch 2.")


def test_what_is_right_is_parsed_as_ever() -> None:
    given = _parser().parse_args(["run", "--mesh", "flat", "--steps", "3"])
    assert (given.command, given.mesh, given.steps) == ("run", "flat", 3)
