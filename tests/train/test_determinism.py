"""What a run changes of the process it runs in is put back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fullshard_train.cli import main
from fullshard_train.training.determinism import be_deterministic, settings_put_back
from support.products import few
from support.trainer.jobs import settings


def _state() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        list(warnings.filters),
        torch.get_rng_state().tolist(),
    )


@pytest.fixture(params=[False, True])
def before(request: pytest.FixtureRequest) -> Iterator[tuple[object, ...]]:
    """The settings of a process that wants repeatable kernels by itself, or does not."""
    with settings_put_back():
        torch.use_deterministic_algorithms(request.param)
        yield _state()


def test_repeatable_kernels_are_for_a_run_alone(before: tuple[object, ...]) -> None:
    with pytest.raises(KeyError), settings_put_back():
        be_deterministic()
        warnings.simplefilter("ignore")
        torch.rand(1)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert all(now != then for now, then in zip(_state()[3:], before[3:], strict=True))
        raise KeyError
    assert _state() == before


@pytest.mark.parametrize("before", few([False, True], True), indirect=True)
def test_a_program_that_calls_the_trainer_goes_on_as_before(
    tmp_path: Path, text: Path, before: tuple[object, ...]
) -> None:
    assert main([*settings(), "--data", str(text), "--out", str(tmp_path / "run")]) == 0
    assert _state() == before
