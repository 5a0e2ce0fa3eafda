"""Of a product of parameters, `tests` runs a cross: every value, combined with the first ones."""

from __future__ import annotations

from typing import Any

import pytest

from support.products import changes, few


@pytest.mark.parametrize("letter", ["a", pytest.param("b", id="second"), "c"])
@pytest.mark.parametrize(("number", "flag"), [(1, True), (2, True), (1, False)])
def _product(letter: str, number: int, flag: bool) -> None:
    """Never run: its marks are what is looked at."""


def _changes(**params: Any) -> int:
    return changes(params, _product.pytestmark)  # type: ignore[attr-defined]  # pytest sets it


def test_what_differs_from_the_first_case_in_one_parameter_is_in_the_cross() -> None:
    assert _changes(letter="a", number=1, flag=True) == 0
    assert _changes(letter="b", number=1, flag=True) == 1
    assert _changes(letter="a", number=2, flag=True) == 1


def test_what_differs_in_two_is_not() -> None:
    assert _changes(letter="c", number=2, flag=True) == 2


def test_names_that_go_together_count_once() -> None:
    assert _changes(letter="a", number=2, flag=False) == 1


@pytest.mark.cross
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("column", [0, 1])
def test_a_test_that_differs_in_two_is_marked_matrix(
    row: int, column: int, request: pytest.FixtureRequest
) -> None:
    marked = request.node.get_closest_marker("matrix") is not None
    assert marked is (row + column == 2)


@pytest.mark.parametrize("value", few([(1, 2), "b"], (1, 2)))
def test_a_value_that_is_not_among_the_first_is_marked_matrix(
    value: object, request: pytest.FixtureRequest
) -> None:
    assert (request.node.get_closest_marker("matrix") is not None) is (value == "b")


@pytest.mark.parametrize(
    ("letter", "number"), few([("a", 1), ("b", 2), ("a", 2)], ("b", 2), together=True)
)
def test_values_of_several_names_are_chosen_together(
    letter: str, number: int, request: pytest.FixtureRequest
) -> None:
    marked = request.node.get_closest_marker("matrix") is not None
    assert marked is ((letter, number) != ("b", 2))
