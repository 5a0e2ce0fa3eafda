"""A parser of command lines that helps: it names the option that was probably meant.

Owns what the commands of all packages have in common: no abbreviations, ``--version``, suggestions.
Refuses: options of any command.
"""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from typing import Any, NoReturn

import torch

__all__ = ["CommandParser"]

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)
_NO_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors end with "did you mean ...?" where an option or a choice is close."""

    def __init__(self, *, version: str = "", **options: Any) -> None:
        """Make the parser, and of ``version`` an option that prints it; see ``ArgumentParser``."""
        super().__init__(allow_abbrev=False, **options)
        if version:
            shown = f"%(prog)s {version}, torch {torch.__version__}"
            self.add_argument("--version", action="version", version=shown)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and report unknown arguments by the parser of the command that has them."""
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = self
            while chosen := parser._chosen(given):
                parser = chosen
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return given

    def error(self, message: str) -> NoReturn:
        """Report ``message`` with a suggestion, if there is one."""
        super().error(self.with_suggestion(message))

    def with_suggestion(self, message: str) -> str:
        """Return ``message``, with the option or choice that is closest to the wrong word."""
        if unknown := _UNKNOWN.fullmatch(message):
            word = unknown[1].split()[0].partition("=")[0]
            known = list(self._option_string_actions)
        elif choice := _NO_CHOICE.search(message):
            word, known = choice[1], re.findall(r"[^',\s]+", choice[2])
        else:
            return message
        close = get_close_matches(word, known, n=1)
        return f"{message}; did you mean {close[0]}?" if close else message

    def _chosen(self, given: argparse.Namespace) -> CommandParser | None:
        """Return the parser of the chosen command; None if there are no commands."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(getattr(given, action.dest, None) or "")
                return chosen if isinstance(chosen, CommandParser) else None
        return None
