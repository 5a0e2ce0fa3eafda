"""Private names of torch that the hooks of a backward use, each with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.autograd import graph

__all__ = [
    "calling_frame",
    "is_running",
    "queue_end_of_backward",
    "refuse_compiled_autograd",
    "refuse_split_backward",
]


queue_end_of_backward: Callable[[Callable[[], None]], None]
queue_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
"""Calls its argument when this backward ends without an error, as DDP does (its engine)."""


def refuse_compiled_autograd() -> None:
    """Raise if compiled autograd is on: it reads saved parameters before any hook can gather.

    Its own flags show whether it captures backwards now.
    """
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")  # not imported: not in use
    if module is not None and (
        module.compiled_autograd_enabled or module.in_compiled_autograd_region
    ):
        raise RuntimeError(
            "compiled autograd is on, in which gradients of a sharded module would be lost; turn "
            "compiled autograd off. Compiled forwards work"
        )


def refuse_split_backward() -> None:
    """Raise if a pipeline stage of torch runs the part of a backward that is the inputs'.

    Autograd calls hooks on the calling thread, or on a thread of its own without a caller
    (``pipelining._backward.stage_backward_input``; ``autograd.graph._engine_run_backward``).
    """
    stages = sys.modules.get("torch.distributed.pipelining._backward")
    if stages is None:
        return
    split, run = (
        id(each.__code__) for each in (stages.stage_backward_input, graph._engine_run_backward)
    )
    codes = _codes_above(sys._getframe())
    if run not in codes:
        codes = {each for frame in sys._current_frames().values() for each in _codes_above(frame)}
    if split in codes:
        raise RuntimeError(
            "a pipeline schedule splits the backward of a sharded module, whose parameters "
            "would get no gradient: the stage is torch's, which takes the module for one "
            "that is not sharded; use fullshard.wrappers.pipelining.PipelineStage, or call "
            "fullshard.wrappers.install() before torch's is imported"
        )


def _codes_above(frame: FrameType | None) -> set[int]:
    """Return the ids of the code of ``frame`` and of all its callers.

    Code that the compiler made may have a dict among its constants, and then no hash.
    """
    found = set()
    while frame is not None:
        found.add(id(frame.f_code))
        frame = frame.f_back
    return found


def calling_frame() -> FrameType:
    """Return the frame that called this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("fullshard."):
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None) -> bool:
    """Return whether ``frame`` is on the stack of any thread."""
    stacks = set(sys._current_frames().values())
    while stacks and frame not in stacks:
        stacks = {each.f_back for each in stacks if each.f_back is not None}
    return bool(stacks)
