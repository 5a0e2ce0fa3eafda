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
    ("depth", "expected"),
    [
        (0, [[], [], [], []]),
        (1, [[1], [2], [3], []]),
        (2, [[1, 2], [2, 3], [3], []]),
        (9, [[1, 2, 3], [2, 3], [3], []]),
    ],
)
def test_forward_asks_for_the_next_modules_nearest_first(
    depth: int, expected: list[list[int]]
) -> None:
    policy = DepthPrefetch(forward=depth, backward=5)
    assert [list(policy.in_forward(ORDER, i)) for i in range(len(ORDER))] == expected


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (0, [[], [], [], []]),
        (1, [[], [0], [1], [2]]),
        (2, [[], [0], [1, 0], [2, 1]]),
        (9, [[], [0], [1, 0], [2, 1, 0]]),
    ],
)
def test_backward_asks_for_the_modules_before_nearest_first(
    depth: int, expected: list[list[int]]
) -> None:
    policy = DepthPrefetch(forward=5, backward=depth)
    assert [list(policy.in_backward(ORDER, i)) for i in range(len(ORDER))] == expected


def test_no_prefetch_asks_for_nothing() -> None:
    for position in range(len(ORDER)):
        assert list(NoPrefetch().in_forward(ORDER, position)) == []
        assert list(NoPrefetch().in_backward(ORDER, position)) == []


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
    for depth in (1, 2, 4):
        forward, backward, gradients = _prefetched(DepthPrefetch(forward=depth, backward=depth))
        assert forward == BLOCKS
        # The root's backward begins first; the order ends with it.
        assert backward == BLOCKS[::-1]
        assert_equal_state(gradients, expected)


@distributed(2)
def test_forward_and_backward_depths_are_independent() -> None:
    forward, backward, _ = _prefetched(DepthPrefetch(forward=1, backward=0))
    assert (forward, backward) == (BLOCKS, [])
    forward, backward, _ = _prefetched(DepthPrefetch(forward=0, backward=1))
    assert (forward, backward) == ([], BLOCKS[::-1])
