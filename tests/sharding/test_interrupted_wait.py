"""An interrupt of the wait for reductions loses no gradient of a backward that ended."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from fullshard.comm import ReduceInFlight
from fullshard.sharding import Schedule
from support.parity.compare import assert_equal, gradients_of, rounding
from support.ranks import distributed
from support.surface.model import batch, build, sharded


def _model() -> Any:
    """A model of three groups, whose reductions are all in flight until they are waited for."""
    model: Any = sharded(build())
    model.set_schedule(Schedule())
    model.set_reduce_scatter_max_input_buffers(3)
    return model


def _interrupted(model: Any, waits: int) -> None:
    """Run a forward and a backward that an interrupt ends in a wait, after ``waits`` of them."""
    done: list[ReduceInFlight] = []
    wait = ReduceInFlight.wait

    def interrupted(flight: ReduceInFlight) -> Any:
        if len(done) == waits:
            raise KeyboardInterrupt
        done.append(flight)
        return wait(flight)

    output = model(batch(1))
    with patch.object(ReduceInFlight, "wait", interrupted), pytest.raises(KeyboardInterrupt):
        output.sum().backward()


@pytest.mark.parametrize("resets", [True, False])
@pytest.mark.parametrize("waits", [0, 1])
@distributed(2)
def test_gradients_that_an_earlier_backward_left_under_way_arrive(
    waits: int, resets: bool, world_size: int
) -> None:
    """A backward begins by waiting for them; this is where Ctrl-C finds a slow network."""
    model, whole = _model(), build()
    model.set_is_last_backward(False)
    for each in (model, whole):
        each(batch(0)).sum().backward()
    _interrupted(model, waits)
    if resets:
        model.reset_iter_state()
    model.set_is_last_backward(True)
    for each in (model, whole):
        each(batch(2)).sum().backward()
    assert_equal(gradients_of(model), gradients_of(whole), rounding(world_size), "gradients")


@pytest.mark.parametrize("waits", [0, 1])
@distributed(2)
def test_a_backward_that_is_interrupted_at_its_end_leaves_all_of_its_gradients(
    waits: int, world_size: int
) -> None:
    model, whole = _model(), build()
    _interrupted(model, waits)
    model.reset_iter_state()
    whole(batch(1)).sum().backward()
    assert_equal(gradients_of(model), gradients_of(whole), rounding(world_size), "gradients")
