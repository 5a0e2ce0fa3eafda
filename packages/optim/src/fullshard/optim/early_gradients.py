"""Sharded gradients in place during backward, for optimizers that step beside it.

Owns ``early_gradients``. By default the gradients of a backward are put in place at its end, where
the host waits once. Inside the block each reduction puts the gradients of earlier ones in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from fullshard.sharding.spi import RootContext, the_states

__all__ = ["early_gradients"]


@contextmanager
def early_gradients(module: nn.Module, ready: Callable[[], None]) -> Iterator[None]:
    """Put the gradients of a group in place before the next group reduces, inside the block.

    ``.grad`` is set, and hooks after accumulation are called, in backward. Reductions of earlier
    backwards, under ``set_is_last_backward(False)``, end before the block. A backward that raises
    leaves the gradients that are in place. Three kinds of roots keep the default: a root with
    another schedule, a root whose backwards are finished by hand, and a root whose next backward is
    not the last one.

    Args:
        module: the model: gradients of all sharded modules in it.
        ready: called after gradients were put in place, on the thread of backward.

    Raises:
        ValueError: if parameters of a group are not on the CPU: a wait for their gradients would
            hold the device up.
    """
    states = the_states(module, recurse=True)
    for state in states:  # the outermost comes first, and becomes the root of those below
        state.ensure_initialised()
    contexts = dict.fromkeys(state.context for state in states)
    for context in contexts:
        _require_on_cpu(context)
    for context in contexts:  # of earlier backwards of the step: their gradients are not early
        if not context.finalizes_by_hand:
            context.shared.queue.commit_sealed()
    before = [(context.schedule, context.schedule.before_reduction) for context in contexts]
    for context in contexts:
        context.schedule.before_reduction = partial(_commit, context, ready)
    try:
        yield
    finally:
        for schedule, earlier in before:
            schedule.before_reduction = earlier


def _commit(context: RootContext, ready: Callable[[], None]) -> None:
    """Put gradients in place whose reductions were launched, and call ``ready``."""
    queue, streams = context.shared.queue, context.shared.streams
    if len(queue) == 0 or context.finalizes_by_hand or not context.is_last_backward:
        return
    # The host waits for this stream, not for the one that computes.
    with streams.use(streams.all_reduce):
        queue.commit()
        done = streams.record()
    streams.current().wait_event(done)
    ready()


def _require_on_cpu(context: RootContext) -> None:
    for group in context.groups:
        home = group.policies.offload.home(group.device)
        if home.type != "cpu":
            raise ValueError(
                f"the parameters of group {group.name!r} are on {home}; early gradients need them "
                "on the CPU: pass offload_policy=CPUOffloadPolicy() to each fully_shard call"
            )
