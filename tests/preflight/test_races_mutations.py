"""Each wait, event and kept reference of the engine is needed, and its loss is seen."""

from __future__ import annotations

import pytest

from fullshard.preflight.races import check
from support.races.mutations import MUTATIONS, Mutation, mutated
from support.races.programs import PROGRAMS


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if not m.redundant], ids=str)
def test_a_changed_line_is_reported(mutation: Mutation) -> None:
    with mutated(mutation):
        report = check(PROGRAMS[mutation.program], mesh=mutation.mesh)
    assert report.races


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.redundant], ids=str)
def test_a_line_listed_as_redundant_is_not(mutation: Mutation) -> None:
    with mutated(mutation):
        check(PROGRAMS[mutation.program], mesh=mutation.mesh).raise_if_any()
