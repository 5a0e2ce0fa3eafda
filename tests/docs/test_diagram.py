"""The state diagram of the documentation is the engine's table of transitions."""

from __future__ import annotations

import re

from fullshard.sharding.base.states import TRANSITIONS
from support.members import ROOT


def test_the_diagram_shows_every_transition_and_no_other() -> None:
    page = (ROOT / "docs" / "concepts" / "states.md").read_text()
    drawn = set(re.findall(r"(?m)^    (\w+) --> (\w+):", page))
    table = {(one.name, after.name) for one, others in TRANSITIONS.items() for after in others}
    assert drawn == table
