"""Schedules of ``torch.distributed.pipelining`` over sharded stages give the unsharded gradients.

By ``PipelineStage`` of ``fullshard.wrappers.pipelining`` each parameter group is gathered once and
reduced once in a step, also by schedules that split backward. By torch's own stage the other
schedules are right too, and those that split backward raise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor

from fullshard.sharding import FSDPModule, replicate, unsharded
from fullshard.sharding.hooks.compat import refuse_split_backward
from fullshard.wrappers import install, uninstall
from fullshard.wrappers.pipelining import PipelineStage
from support.events.recorder import assert_all_returned
from support.parity.engines import OURS, TORCH, Engine
from support.pipelines import SCHEDULES, SPLITS, Pipeline, shard_whole
from support.products import few
from support.ranks import distributed

TORCHS_STAGE = pipelining.PipelineStage
DEFERS = "finalize_gradients" in inspect.signature(pipelining.ScheduleGPipe.step).parameters
EVALUATION_FAILS = {"zbv", "dual pipe v"}  # of torch 2.13, whatever the stages are
WHOLE = [name for name in SCHEDULES if name not in SPLITS]


@contextmanager
def _failing() -> Iterator[None]:
    """All ranks raise before they exchange anything."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError("a broken disk")

    with (
        mock.patch.object(PipelineStage, "forward_one_chunk", fail),
        mock.patch.object(PipelineStage, "get_fwd_recv_ops", fail),
    ):
        yield


def _assert_returned(pipeline: Pipeline) -> None:
    for part in pipeline.parts.values():
        assert_all_returned(part)


def _assert_right(pipeline: Pipeline, steps: int = 2) -> None:
    """Each step has the gradients of the unsharded stages, and leaves nothing gathered."""
    for seed in range(steps):
        pipeline.zero_grad()
        pipeline.step(seed)
        assert pipeline.wrong(seed) == []
        _assert_returned(pipeline)


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.cross
@pytest.mark.parametrize("scale", [True, False], ids=["scaled by torch", "by the loss"])
@pytest.mark.parametrize(
    "name", few(SCHEDULES, "gpipe", "1f1b", "interleaved 1f1b", "zero bubble", "zbv")
)
@distributed(4, 2)
def test_a_schedule_has_the_gradients_of_the_unsharded_stages(name: str, scale: bool) -> None:
    _assert_right(Pipeline(name, PipelineStage, scale=scale), steps=3)


def _blocks_only(engine: Engine, part: nn.Sequential, mesh: DeviceMesh) -> None:
    for block in part:
        engine.fully_shard(block, mesh=mesh)


def _replicated(engine: Engine, part: nn.Sequential, mesh: DeviceMesh) -> None:
    for block in part:
        replicate(block, mesh=mesh)
    replicate(part, mesh=mesh)


def _kept(engine: Engine, part: nn.Sequential, mesh: DeviceMesh) -> None:
    for block in part:
        engine.fully_shard(block, mesh=mesh, reshard_after_forward=False)
    engine.fully_shard(part, mesh=mesh)


@pytest.mark.cross
@pytest.mark.parametrize("shard", [_blocks_only, _replicated, _kept])
@pytest.mark.parametrize("name", ["1f1b", "zero bubble", "zbv"])
@distributed(4)
def test_so_it_has_however_its_modules_are_sharded(
    name: str, shard: Callable[[Engine, nn.Sequential, DeviceMesh], None]
) -> None:
    _assert_right(Pipeline(name, PipelineStage, shard=shard))


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
@distributed(2)
def test_a_stage_without_a_sharded_module_is_torchs(name: str) -> None:
    _assert_right(Pipeline(name, PipelineStage, shard=lambda *_: None))


# -- settings of the user -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@distributed(4)
def test_steps_without_synchronisation_add_up_until_one_with_it(name: str) -> None:
    pipeline = Pipeline(name, PipelineStage, scale=False)
    pipeline.record()
    for seed in range(3):
        for part in pipeline.parts.values():
            part.set_requires_gradient_sync(seed == 2)  # type: ignore[operator]  # sharded
        pipeline.step(seed)
        _assert_returned(pipeline)
    assert pipeline.wrong(0, 1, 2) == []
    for recorder in pipeline.recorders.values():
        assert sorted(recorder.reductions) == ["0", "1"]


@pytest.mark.skipif(not DEFERS, reason="schedules defer gradients since torch 2.15")
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("name", few(SCHEDULES, "1f1b", "zero bubble", "zbv"))
@distributed(4)
def test_deferred_gradients_are_reduced_and_scaled_once_as_with_torchs_own(
    name: str, scale: bool
) -> None:
    """Gradients of torch's own are wrong, deferred or not, if the schedule splits backward."""
    counts = []
    for engine, stage in ((OURS, PipelineStage), (TORCH, TORCHS_STAGE)):
        pipeline = Pipeline(name, stage, engine, scale=scale)
        for first in (0, 3):
            pipeline.zero_grad()
            pipeline.record()
            for seed in range(first, first + 3):
                pipeline.step(seed, finalize_gradients=seed == first + 2)
            if engine is OURS or name in WHOLE:
                assert pipeline.wrong(first, first + 1, first + 2) == []
            if engine is OURS:
                _assert_returned(pipeline)
        counts.append([(len(r.gathers), len(r.reductions)) for r in pipeline.recorders.values()])
    assert all(mine == (2, 2) for mine in counts[0])
    assert all(mine[0] <= theirs[0] for mine, theirs in zip(*counts, strict=True)), counts


@pytest.mark.skipif(not DEFERS, reason="schedules defer gradients since torch 2.15")
@pytest.mark.parametrize("name", ["1f1b", "zero bubble"])
@distributed(4)
def test_an_evaluation_leaves_deferred_gradients_and_an_error_drops_them(name: str) -> None:
    pipeline = Pipeline(name, PipelineStage)
    pipeline.step(0, finalize_gradients=False)
    with torch.no_grad():
        pipeline.evaluate(5)
    pipeline.step(1)
    assert pipeline.wrong(0, 1) == []
    pipeline.step(2, finalize_gradients=False)
    with _failing(), pytest.raises(OSError, match="a broken disk"):
        pipeline.step(3)
    pipeline.zero_grad()
    with pytest.warns(RuntimeWarning, match="gradients of earlier backwards"):
        pipeline.step(4)
    assert pipeline.wrong(4) == []
    _assert_returned(pipeline)


@pytest.mark.parametrize("scale", [True, False])
@distributed(4)
def test_a_stage_that_stays_unsharded_after_its_step_has_its_gradients_scaled(scale: bool) -> None:
    pipeline = Pipeline("zbv", PipelineStage, scale=scale)
    for part in pipeline.parts.values():
        part.set_reshard_after_backward(False)  # type: ignore[operator]  # sharded
    pipeline.step(0)
    for part in pipeline.parts.values():
        assert not any(isinstance(param, DTensor) for param in part.parameters())
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    assert pipeline.wrong(0) == []


@distributed(4)
def test_a_user_may_hold_the_parameters_around_a_step() -> None:
    pipeline = Pipeline("zero bubble", PipelineStage)
    first, second = pipeline.parts.values()
    with unsharded(first), unsharded(second):
        pipeline.step(0)
    _assert_returned(pipeline)
    assert pipeline.wrong(0) == []


# -- collectives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", few(SCHEDULES, "1f1b", "zbv"))
@distributed(4)
def test_it_gathers_and_reduces_each_group_once_and_no_more_than_torchs_own(name: str) -> None:
    """Gradients of torch's own are not compared: on 2.13 and 2.15 some are wrong or missing."""
    counts = []
    for engine, stage in ((OURS, PipelineStage), (TORCH, TORCHS_STAGE)):
        pipeline = Pipeline(name, stage, engine)
        pipeline.record()
        for seed in range(2):
            for recorder in pipeline.recorders.values():
                recorder.clear()
            pipeline.step(seed)
            if engine is OURS:
                for recorder in pipeline.recorders.values():
                    assert sorted(recorder.gathers) == sorted(recorder.reductions) == ["0", "1"]
        counts.append([(len(r.gathers), len(r.reductions)) for r in pipeline.recorders.values()])
    for mine, theirs in zip(*counts, strict=True):
        assert mine[0] <= theirs[0] and (mine[1] <= theirs[1] or not theirs[1]), counts


# -- evaluation -----------------------------------------------------------------------------------


@pytest.mark.cross
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(
    "name", few(sorted(SCHEDULES.keys() - EVALUATION_FAILS), "1f1b", "zero bubble")
)
@distributed(4)
def test_an_evaluation_between_steps_gathers_once_and_changes_no_gradient(
    name: str, grad: bool
) -> None:
    pipeline = Pipeline(name, PipelineStage)
    pipeline.record()
    for seed in range(2):
        pipeline.zero_grad()
        pipeline.step(seed)
        for recorder in pipeline.recorders.values():
            recorder.clear()
        with torch.set_grad_enabled(grad):
            outputs = pipeline.evaluate(seed)
        for recorder in pipeline.recorders.values():
            assert sorted(recorder.gathers) == ["0", "1"]
            assert recorder.reductions == []
        _assert_returned(pipeline)
        assert pipeline.wrong(seed) == []
        if outputs is not None:
            inputs, _ = pipeline.batch(seed, pipeline.replica)
            torch.testing.assert_close(outputs.detach(), pipeline.plain()(inputs).detach())


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:gradients of earlier backwards")
@pytest.mark.parametrize("name", ["gpipe", "zbv"])
@distributed(4)
def test_after_a_step_that_raised_the_next_one_is_right(name: str) -> None:
    pipeline = Pipeline(name, PipelineStage)
    pipeline.step(0)
    pipeline.zero_grad()
    with _failing(), pytest.raises(OSError, match="a broken disk"):
        pipeline.step(1)
    pipeline.step(2)
    assert pipeline.wrong(2) == []
    _assert_returned(pipeline)


@pytest.mark.parametrize("name", few(WHOLE, "1f1b", "interleaved 1f1b"))
@distributed(4)
def test_torchs_own_stage_gives_the_right_gradients_unless_backward_is_split(name: str) -> None:
    _assert_right(Pipeline(name, TORCHS_STAGE))


@pytest.mark.parametrize("shard", [shard_whole, _blocks_only])
@pytest.mark.parametrize("name", SPLITS)
@distributed(2)
def test_torchs_own_stage_that_splits_backward_raises_and_names_ours(
    name: str, shard: Callable[[Engine, nn.Sequential, DeviceMesh], None]
) -> None:
    pipeline = Pipeline(name, TORCHS_STAGE, shard=shard)
    # ranks raise at different times, so none waits for what another was to send
    with (
        mock.patch.object(schedules, "_batch_p2p", lambda *_, **__: []),
        pytest.raises(RuntimeError) as caught,
    ):
        pipeline.step(0)
    errors = [caught.value, caught.value.__cause__]
    assert any("fullshard.wrappers.pipelining.PipelineStage" in str(each) for each in errors)


@distributed(2)
def test_gradients_of_inputs_alone_are_no_error() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for part in (*model, model):
        OURS.fully_shard(part)
    x = torch.ones(2, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    with unsharded(model):
        torch.testing.assert_close(grad, (model[1].weight.sum(0) @ model[0].weight).expand(2, 4))


# -- in the place of torch's ----------------------------------------------------------------------


@distributed(4)
def test_under_install_torchs_name_means_ours() -> None:
    install()
    try:
        stage = pipelining.PipelineStage
        assert stage is PipelineStage
        assert pipelining.stage.PipelineStage is PipelineStage
    finally:
        uninstall()
    assert pipelining.PipelineStage is pipelining.stage.PipelineStage is TORCHS_STAGE
    _assert_right(Pipeline("zbv", stage), steps=1)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@distributed(4)
def test_a_reduction_may_be_started_and_waited_for_apart(name: str) -> None:
    """As the stages of torch 2.15 let schedules do with torch's own modules."""

    def both(stage: Any, factor: int) -> None:
        stage.start_gradient_reduction()
        assert all(param.grad is None for param in stage.submod.parameters())
        stage.wait_for_gradient_reduction(factor)

    with mock.patch.object(PipelineStage, "perform_reduce_grad", both):
        _assert_right(Pipeline(name, PipelineStage), steps=1)


def test_code_that_the_compiler_made_may_call_a_backward() -> None:
    """Such code may have a dict among its constants, and then no hash."""

    def call(function: Any) -> Any:
        return function(), None

    code = call.__code__.replace(co_consts=(*call.__code__.co_consts, {}))
    with pytest.raises(TypeError):
        hash(code)
    assert FunctionType(code, {})(refuse_split_backward) == (None, None)
