"""Carries out a `FuzzCase` on every rank, beside the unsharded model, and compares each step."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.insight import SlowRanks
from fullshard.optim import clip_grad_norm_
from fullshard.optim.tiers.state_file import StateFile
from fullshard.sharding import FSDPModule
from support.fuzz.around import NOTHING, AroundCase, Norm, draw_around
from support.fuzz.blocks import BlockCase, unsaved
from support.fuzz.carried import checkpoints
from support.fuzz.case import FuzzCase, StepCase, draw
from support.fuzz.events import before_micro_batch, before_step
from support.fuzz.more import PLAIN, MoreCase, draw_more
from support.fuzz.moves import move_before_step
from support.fuzz.pair import Pair

__all__ = ["run_case", "run_drawn"]

LARGEST_NORM_ERROR = 64  # eps


def run_case(seed: int, around: bool = False, more: bool = False) -> None:
    """Trains sharded and unsharded, and raises where they differ.

    Args:
        seed: of the run.
        around: whether other features are drawn to be around it.
        more: whether the program does more, too.
    """
    case = draw(seed)
    if more:
        run_drawn(case, *draw_more(case))
    else:
        run_drawn(case, draw_around(case) if around else NOTHING)


def run_drawn(case: FuzzCase, drawn: AroundCase, more: MoreCase = PLAIN) -> None:
    """Do what ``run_case`` does, for a case, what is around it, and what else it does."""
    watch, threads = SlowRanks() if drawn.watches else None, {*threading.enumerate()}
    with tempfile.TemporaryDirectory(prefix="fullshard-fuzz-") as folder:
        with watch or nullcontext():
            _train(Pair(case, drawn, Path(folder), more))
            if watch is not None:
                watch.report()
        if not (more.carried.kind and max(map(checkpoints, case.nodes))):
            _require_nothing_left(Path(folder), threads)


def _train(pair: Pair) -> None:
    for step, plan in enumerate(pair.case.steps):
        pair.step = step
        move_before_step(pair)
        before_step(pair)
        _open_before(pair)
        if plan.evaluates:
            pair.compare_evaluations(7)
        with pair.run.around.step() as before_update:
            if pair.program.more.closure:
                _step_by_closure(pair, plan, before_update)
            else:
                _backwards(pair, plan)
                norms = _prepare_step(pair, plan, before_update)
                for optimizer, scaler in zip(pair.optimizers, pair.scalers, strict=True):
                    scaler.step(optimizer)
                    scaler.update()
                _end_step(pair, norms)
        pair.compare_parameters(f"after step {step}")
        pair.compare_kept()
        if pair.has_diverged():
            return
        if pair.averages is not None:
            pair.averages.update()
    pair.program.end()


def _backwards(pair: Pair, plan: StepCase) -> None:
    model, around = pair.run.model, pair.run.around
    if plan.by_count:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(torch.tensor(float(pair.case.world_size)))
    micros = range(len(plan.synchronise))
    outcomes = [pair.outcome(micro) for micro in micros] if plan.forwards_first else []
    writes: list[Callable[[], None]] = []  # of the unsharded model, whose forwards come later
    for micro in micros:
        model.set_requires_gradient_sync(plan.synchronise[micro])
        if around.has_replicas and plan.synchronise[micro]:
            model.set_requires_all_reduce(plan.all_reduce[micro])
        model.set_is_last_backward(plan.waits[micro])
        if micro:
            before_micro_batch(pair, micro)
        outcome = outcomes[micro] if outcomes else pair.outcome(micro)
        if (block := _block_inside(pair, micro)) is not None:
            names = unsaved(pair.oracle.model)
            writes.append(pair.open_block(block, names, fresh=not writes))
        around_backward: AbstractContextManager[None] = nullcontext()
        if micro == micros[-1]:
            clipped = plan.max_norm is not None
            around_backward = around.last_backward(pair.run.optimizer, pair.step, clipped)
        with around_backward:
            pair.program.backward(outcome.loss, pair.step, micro)
        wanted = pair.oracle.backward(pair.step, micro)[dist.get_rank()]
        pair.compare_outcomes(outcome, wanted, f"micro-batch {micro}")
        pair.keep(outcome)
        if not outcomes or micro == micros[-1]:
            for write in writes:
                write()
            writes.clear()


def _open_before(pair: Pair) -> None:
    """Open the block before a step, perhaps while a graph is alive that no backward uses."""
    blocks = pair.program.more.blocks.before
    block = blocks[pair.step] if blocks else None
    if block is None:
        return
    if block.forward:
        pair.alive.append(pair.outcome(0))
    names = [name for name, _ in pair.oracle.model.named_parameters()]
    pair.open_block(block, names, fresh=True)()
    if not block.forward:  # else the graph may keep full parameters, in the dtype of the forward
        pair.compare_parameters(f"after a block before step {pair.step}")


def _block_inside(pair: Pair, micro: int) -> BlockCase | None:
    blocks = pair.program.more.blocks.inside
    return blocks[pair.step][micro] if blocks else None


_Norms = tuple[torch.Tensor | None, torch.Tensor | None]


def _step_by_closure(pair: Pair, plan: StepCase, before_update: Callable[[], None]) -> None:
    """Let the optimizer of the sharded model call for the backwards of both runs."""
    norms: list[_Norms] = []

    def closure() -> float:
        _backwards(pair, plan)
        norms.append(_prepare_step(pair, plan, before_update))
        return 0.0

    pair.run.optimizer.step(closure)
    pair.oracle.optimizer.step()
    (found,) = norms
    _end_step(pair, found)


def _prepare_step(pair: Pair, plan: StepCase, before_update: Callable[[], None]) -> _Norms:
    """Compare and clip, and return the norms of both."""
    drawn = pair.run.around.case
    begun = drawn.optimizer == "overlapped"  # some parameters are stepped, and scaled, already
    for optimizer, scaler in zip(pair.optimizers, pair.scalers, strict=True):
        scaler.unscale_(optimizer)
    finite = not pair.program.more.overflows_in(pair.step)
    if drawn.norm is not Norm.PREVIOUS and finite:
        pair.compare_gradients(f"step {pair.step}")
    if not begun:
        pair.compare_parameters(f"step {pair.step}")
    norm = None
    if drawn.norm is Norm.BY_HAND and plan.max_norm is not None:
        norm = clip_grad_norm_(pair.run.model, plan.max_norm)
    wanted = pair.oracle.clip(plan)
    before_update()
    return norm, wanted


def _end_step(pair: Pair, norms: _Norms) -> None:
    """Compare what was stepped, and prepare for the next step."""
    norm, wanted = norms
    drawn, finite = pair.run.around.case, not pair.program.more.overflows_in(pair.step)
    if drawn.norm is not Norm.BY_HAND:
        norm = pair.run.optimizer.total_norm
    if finite:
        pair.compare_gradients(f"that were stepped in {pair.step}")
    assert (norm is None) is (wanted is None)
    if norm is not None and wanted is not None and finite:
        _compare_norms(pair, norm, wanted)
    assert len({scaler.get_scale() for scaler in pair.scalers}) == 1
    for optimizer in pair.optimizers:
        optimizer.zero_grad(set_to_none=not drawn.fills_zeros)
        for group in optimizer.param_groups if drawn.decays else ():
            group["lr"] *= 0.9


def _compare_norms(pair: Pair, norm: torch.Tensor, wanted: torch.Tensor) -> None:
    dtype = torch.float32 if pair.drawn.mixed else torch.float64
    units = LARGEST_NORM_ERROR * pair.runs**pair.step
    allowed = units * torch.finfo(dtype).eps * float(wanted)
    if not torch.isfinite(wanted):  # the model has diverged
        assert not torch.isfinite(norm), f"norm {norm} is not {wanted}"
        return
    assert abs(float(norm) - float(wanted)) <= allowed, f"norm {norm} is not {wanted}"


def _holders_of_files() -> str:
    """Return which kinds of objects hold files of optimizer state, for a message."""
    files = [each for each in gc.get_objects() if isinstance(each, StateFile)]
    holders = {type(each).__qualname__ for file in files for each in gc.get_referrers(file)}
    return f"{len(files)} files of state are held by {', '.join(sorted(holders))}"


def _require_nothing_left(folder: Path, before: set[threading.Thread]) -> None:
    """Raise if files or threads of policies and tiers outlive their models.

    Not for programs that put what a checkpointed region computes into an argument of the region.
    There plain torch keeps the model, too: a cycle through autograd, which Python does not see.

    Args:
        folder: of the files.
        before: threads that were there before the run.
    """
    gc.collect()
    own = {*threading.enumerate()} - before
    threads = [each for each in own if each.name.startswith("fullshard-")]
    for thread in threads:
        for _ in range(100):  # a collection while another thread collects does nothing
            thread.join(timeout=0.1)
            if not thread.is_alive():
                break
            gc.collect()
    alive = [each.name for each in threads if each.is_alive()]
    assert not alive, f"threads stay: {alive}; {_holders_of_files()}"
    gc.collect()  # what the threads held
    opened = []
    for number in os.listdir("/proc/self/fd"):
        try:
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # that of the list
            continue
    left = [each for each in opened if each.startswith(str(folder))]
    assert not left, f"files stay open: {left}"
    named = [each.name for each in folder.iterdir() if not each.name.startswith(("dcp-", "safe"))]
    assert not named, f"files stay in the folder: {named}"
    dist.barrier()
