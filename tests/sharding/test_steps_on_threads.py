"""Ranks may be threads of one process: what their optimizers share is walked while others add."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from fullshard.optim.steps.shadow_optimizer import ShadowOptimizer, open_on
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.optim.live_groups import all_groups
from fullshard.sharding.optim.step_hooks import watch_optimizers

ROUNDS = 20


def _beside(work: Callable[[], None], look: Callable[[], object]) -> None:
    """Looks while another thread does ``work`` ``ROUNDS`` times; they take turns very often."""

    def run() -> None:
        for _ in range(ROUNDS):
            work()

    interval, thread = sys.getswitchinterval(), threading.Thread(target=run)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        while thread.is_alive():
            look()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


class _Group:
    """Stands for a group: what is asked here is only that it is alive."""


def test_the_groups_of_all_models_are_walked_while_another_thread_makes_models() -> None:
    made: list[_Group] = []

    def make() -> None:
        made[:] = [_Group() for _ in range(50)]
        watch_optimizers(cast("list[FSDPParamGroup]", made))

    _beside(make, all_groups)
    assert set(made) <= set(cast("tuple[Any, ...]", all_groups()))


@pytest.mark.matrix
def test_steps_in_progress_are_walked_while_another_thread_begins_steps() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    held: list[ShadowOptimizer] = []

    def begin() -> None:
        held[:] = [ShadowOptimizer(plain=True) for _ in range(200)]
        for step in held:
            step._of = step.copies = {param: cast("Any", None)}  # as with an offloaded shard
            with patch.object(step, "_show"):
                step.begin(optimizer)

    _beside(begin, lambda: open_on([param]))
    assert set(held) <= set(open_on([param]))
