"""Prefetch policies: the positions they answer, and the gathers that follow in the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import DepthPrefetch, NoPrefetch
from support.parity.compare import full
from support.ranks import distributed
from support.surface.model import batch, build, sharded
from support.surface.ranks import assert_equal_state

ORDER = ("", "a", "b", "c")


@pytest.mark.parametrize(
    ("depth", "forward", "backward"),
    [
        (0, [[], [], [], []], [[], [], [], []]),
        (1, [[1], [2], [3], []], [[], [0], [1], [2]]),
        (2, [[1, 2], [2, 3], [3], []], [[], [0], [1, 0], [2, 1]]),
        (9, [[1, 2, 3], [2, 3], [3], []], [[], [0], [1, 0], [2, 1, 0]]),
    ],
)
def test_the_next_modules_in_forward_and_those_before_in_backward_come_nearest_first(
    depth: int, forward: list[list[int]], backward: list[list[int]]
) -> None:
    places, ahead = range(len(ORDER)), DepthPrefetch(forward=depth, backward=5)
    assert [list(ahead.in_forward(ORDER, place)) for place in places] == forward
    ahead = DepthPrefetch(forward=5, backward=depth)
    assert [list(ahead.in_backward(ORDER, place)) for place in places] == backward


@pytest.mark.parametrize("field", ["forward", "backward"])
def test_a_wrong_depth_is_an_error_that_names_it(field: str) -> None:
    wrong: Any
    for wrong in (1.0, "1", True, None):
        with pytest.raises(TypeError, match=rf"^{field} is .*number of modules"):
            DepthPrefetch(**{field: wrong})
    with pytest.raises(ValueError, match=rf"^{field} is -1; pass 0 or more"):
        DepthPrefetch(**{field: -1})


def _prefetched(policy: Any) -> tuple[list[str], list[str], dict[str, torch.Tensor]]:
    """The gathers ahead of use, in a second step's forward and backward, and the gradients."""
    net = sharded(build(blocks=3), prefetch_policy=policy, reshard_after_forward=True)
    net(batch(1)).sum().backward()
    net.zero_grad()
    forward, backward = EventLog(), EventLog()
    with observe(forward):
        output = net(batch())
    with observe(backward):
        output.sum().backward()
    gradients = {n: full(p.grad) for n, p in net.named_parameters() if p.grad is not None}
    assert gradients.keys() == {name for name, _ in net.named_parameters()}
    return forward.named(EventKind.PREFETCH), backward.named(EventKind.PREFETCH), gradients


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.device(paces=True)
@distributed(2, 4)
def test_the_engine_gathers_ahead_what_the_policy_answers_and_the_gradients_stay_the_same() -> None:
    forward, backward, expected = _prefetched(NoPrefetch())
    assert forward == backward == []
    for depths in ((1, 1), (2, 2), (4, 4), (1, 0), (0, 1)):
        policy = DepthPrefetch(forward=depths[0], backward=depths[1])
        forward, backward, gradients = _prefetched(policy)
        assert forward == (BLOCKS if depths[0] else [])
        # The root's backward begins first; the order ends with it.
        assert backward == (BLOCKS[::-1] if depths[1] else [])
        assert_equal_state(gradients, expected)
