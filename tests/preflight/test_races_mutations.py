"""Each wait, event and kept reference of the engine is needed, and its loss is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fullshard.preflight.races import check
from support.products import few
from support.races.mutations import MUTATIONS, Mutation, mutated
from support.races.programs import PROGRAMS
from support.races.sites import KEPT, LEFT_OUT, changed_sites, kept, sites

# One for each of these functions, which are quick to watch; the rest in the matrix.
_QUICK = {
    "all_gather_tensors",
    "arrived",
    "discard",
    "fill",
    "land",
    "launch",
    "launched",
    "reduce_scatter_tensors",
    "release",
    "take_input",
    "wait_for",
}
_FIRST = {m.function: m for m in reversed(MUTATIONS) if not m.redundant and m.function in _QUICK}
_REDUNDANT = [mutation for mutation in MUTATIONS if mutation.redundant]


def _without(line: str) -> AbstractContextManager[None]:
    return mutated(next(mutation for mutation in MUTATIONS if mutation.line == line))


_LOST: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "synchronize_with_current": (
        lambda: _without("streams.gather.wait_event(packed)"),
        "plain",
    ),
    "wait": (lambda: _without("streams.all_reduce.wait_event(self._reduction.event)"), "plain"),
}
"""By function of a redundant line, a change and a program in which its ordering is lost."""


@pytest.mark.parametrize(
    "mutation", few([m for m in MUTATIONS if not m.redundant], *_FIRST.values()), ids=str
)
def test_a_changed_line_is_reported(mutation: Mutation) -> None:
    with mutated(mutation):
        report = check(PROGRAMS[mutation.program], mesh=mutation.mesh)
    assert report.races


@pytest.mark.parametrize("mutation", _REDUNDANT, ids=str)
def test_a_redundant_line_is_not_for_the_ordering_that_is_named(mutation: Mutation) -> None:
    assert mutation.ordering is not None
    with mutated(mutation), mutation.ordering() as ordered:
        check(PROGRAMS[mutation.program], mesh=mutation.mesh).raise_if_any()
    assert ordered and all(ordered)


@pytest.mark.parametrize(
    "mutation",
    few(_REDUNDANT, *(m for m in _REDUNDANT if m.function != "synchronize_with_current")),
    ids=str,
)
def test_an_ordering_that_is_not_there_is_told_from_one_that_is(mutation: Mutation) -> None:
    lost, program = _LOST[mutation.function]
    assert mutation.ordering is not None
    with mutated(mutation), lost(), mutation.ordering() as ordered:
        check(PROGRAMS[program], mesh=mutation.mesh)
    assert not all(ordered)


def test_every_place_in_the_source_is_changed_by_a_mutation_or_left_out_for_a_reason() -> None:
    changed: Counter[tuple[str, str]] = Counter()
    for mutation in MUTATIONS:
        changed |= changed_sites(mutation)
    left_out = Counter(dict.fromkeys(LEFT_OUT, 1))
    assert not changed & left_out
    assert sites() == changed + left_out


def test_whatever_keeps_memory_in_flight_is_listed_with_who_answers_for_it() -> None:
    assert kept() == KEPT.keys()


def test_the_table_in_the_docs_has_a_row_for_each_change() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "races.md"
    rows = page.read_text().splitlines()
    for mutation in MUTATIONS:
        function = str(mutation).partition(":")[0]
        found = "redundant" if mutation.redundant else "caught"
        row = f"| `{function}` | `{mutation.line}` | `{mutation.instead}` | {found} | "
        assert any(each.startswith(row) for each in rows), row
