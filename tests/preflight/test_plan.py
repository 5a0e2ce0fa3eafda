"""A plan's memory against what ranks measure, and what it refuses."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.preflight import Category, Plan, PlanError, plan, shard_blocks
from fullshard.preflight.compat import lonely_group
from fullshard.preflight.planning.memory.ledger import Ledger
from fullshard.preflight.planning.memory.places import Places
from fullshard.preflight.planning.world import axes_of
from fullshard.samehost import set_shared_memory
from fullshard.sharding import ShardingPlacements, fully_shard
from fullshard.wire import Quantised, WirePolicy
from support.modules import Assembled
from support.parity.models import CASES, Case, build
from support.products import few
from support.ranks import cpu_mesh, distributed, run_on_ranks

NAMES = {1: ("shard",), 2: ("replicate", "shard")}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "mixed": {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    },
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "zero-1": {"placements": ShardingPlacements.zero(1)},
    "zero-2": {"placements": ShardingPlacements.zero(2)},
    "narrow": {"wire_policy": WirePolicy(gathers=torch.bfloat16, reductions=torch.bfloat16)},
    "in-blocks": {"wire_policy": WirePolicy(gathers=Quantised(torch.int8, 16))},
}


def _shard(case: Case, options: str, model: nn.Module, mesh: DeviceMesh) -> None:
    for unit in case.units_of(model):
        fully_shard(unit, mesh=mesh, **OPTIONS[options])
    fully_shard(model, mesh=mesh, **OPTIONS[options])


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in params if each.requires_grad], lr=1e-3)


def _model(name: str) -> nn.Module:
    return build(CASES[name], None if name == "many-dtypes" else torch.float32)


def _batch(name: str) -> list[torch.Tensor]:
    return [each.clone() for each in CASES[name].batch(0, torch.float32)]


def _loss(case: Case, model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(batch[0])
    if batch[1].is_floating_point():  # torch's mse_loss keeps scratch memory behind its scalar
        return (output - batch[1]).square().mean()
    return case.loss(output, batch[1])


def _trained(name: str, options: str, mesh: DeviceMesh) -> tuple[int, int]:
    """Peak and held bytes of the tensors of a rank that trains with values."""
    model, places = _model(name), Places()
    ledger = Ledger(places)
    _shard(CASES[name], options, model, mesh)
    optimizer = _adamw(model.parameters())
    ledger.note(Category.SHARDS, list(model.parameters()), list(model.buffers()))
    with places.followed(model, [optimizer]), ledger:
        for _ in range(2):
            batch = _batch(name)
            ledger.restart()
            _loss(CASES[name], model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            del batch
    return ledger.peak.nbytes, ledger.now


def _measured(name: str, options: str, sizes: tuple[int, ...]) -> tuple[int, int]:
    """The same on a rank of a world that is there, and moves bytes by its process group."""
    set_shared_memory(False)
    try:
        return _trained(name, options, cpu_mesh(sizes, NAMES[len(sizes)]))
    finally:
        set_shared_memory(True)


def _alone(name: str, options: str, sizes: tuple[int, ...]) -> tuple[int, int]:
    """The same with values on a rank whose others are not there."""
    with lonely_group(math.prod(sizes)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[len(sizes)])
        return _trained(name, options, mesh)


def _planned(name: str, options: str, mesh: Any) -> Plan:
    return plan(
        partial(_model, name),
        _batch(name),
        partial(_loss, CASES[name]),
        mesh=mesh,
        shard=partial(_shard, CASES[name], options),
        optimizer=_adamw,
        device="cpu",
    )


SAME = partial(pytest.approx, rel=0.03)  # garbage of Python's may keep a buffer for longer


@pytest.mark.parametrize("name", few(sorted(set(CASES) - {"partly-used", "many-dtypes"}), "lora"))
def test_peak_and_held_are_what_training_with_values_has(name: str) -> None:
    planned = _planned(name, "plain", 3)
    assert (planned.tensors, planned.held) == SAME(_alone(name, "plain", (3,)))


@pytest.mark.parametrize("mesh", few([2, 1, (2, 2), 64], (2, 2)), ids=str)
def test_so_they_are_on_any_mesh(mesh: Any) -> None:
    planned = _planned("transformer", "plain", mesh)
    sizes = tuple(axes_of(mesh).values())
    assert (planned.tensors, planned.held) == SAME(_alone("transformer", "plain", sizes))


@pytest.mark.parametrize("options", few(OPTIONS, "mixed"))
def test_so_they_are_with_each_policy(options: str) -> None:
    planned = _planned("transformer", options, 4)
    assert (planned.tensors, planned.held) == SAME(_alone("transformer", options, (4,)))


@pytest.mark.parametrize("name", few(["transformer", "lora", "many-dtypes", "partly-used"], "lora"))
def test_the_peak_is_what_real_ranks_measure(name: str) -> None:
    peak, _ = run_on_ranks(_measured, 2, name, "plain", (2,))[0]
    assert _planned(name, "plain", 2).tensors == SAME(peak)


def _layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(layer(x)))


def _layers(model: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        if model.checkpointed:
            x = checkpoint(_layer, layer, x, use_reentrant=False)
        else:
            x = _layer(layer, x)
    return x


def stack(checkpointed: bool = False) -> nn.Module:
    """Layers of one width, whose sizes can be told by hand."""
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
    return Assembled(_layers, layers=layers, checkpointed=checkpointed)


def _stack(checkpointed: bool = False, **options: Any) -> Plan:
    settings: dict[str, Any] = {"mesh": 8, "batch": torch.empty(256, 64), **options}
    return plan(lambda: stack(checkpointed), loss=lambda model, x: model(x).sum(), **settings)


def test_the_categories_are_the_sizes_that_one_can_tell_by_hand() -> None:
    planned = _stack()
    weight = 64 * 64 * 4
    assert planned.parameters == 4 * 64 * 64
    assert planned.categories[Category.SHARDS] == 4 * weight // 8
    steps = 4 * 4  # AdamW's counters
    assert planned.categories[Category.OPTIMIZER_STATE] == 2 * 4 * weight // 8 + steps
    assert planned.categories[Category.BATCH] == 256 * 64 * 4
    assert planned.place.phase == "backward"
    assert planned.categories[Category.ACTIVATIONS] >= 6 * 256 * 64 * 4
    assert sum(planned.categories.values()) == planned.peak
    assert set(planned.modules) == {""}, "tanh runs in the model's own forward"
    phases = [place.phase for place in planned.course]
    assert phases.index("forward") < phases.index("backward") < phases.index("optimizer")


def test_what_is_held_between_steps_is_the_state_and_on_a_cpu_buffers() -> None:
    weight, steps = 64 * 64 * 4, 4 * 4
    state = 3 * 4 * weight // 8 + steps
    on_cpu, on_device, on_any = (_stack(device=each) for each in ("cpu", "h100", None))
    assert on_any.peak == on_device.peak, "an accelerator is one, named or not"
    for each in (on_cpu, on_device):
        assert each.held == state + each.kept
    assert on_device.kept < weight // 100, "the masks of used parameters"
    assert on_cpu.kept >= weight, "the pool keeps at least a gather's buffer"
    assert "are buffers for the next step" in str(on_cpu)
    assert "are buffers for the next step" not in str(on_device)


def test_checkpointing_trades_activations_for_a_second_forward() -> None:
    plain, checkpointed = _stack(), _stack(checkpointed=True)
    assert checkpointed.categories[Category.ACTIVATIONS] < plain.categories[Category.ACTIVATIONS]
    assert checkpointed.peak < plain.peak


def test_a_model_on_the_meta_device_is_planned_without_ever_being_whole() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return stack()

    planned = plan(build, torch.empty(8, 64), lambda model, x: model(x).sum(), mesh=64)
    assert planned.construction < 4 * 64 * 64 * 4
    with_values = plan(stack, torch.empty(8, 64), lambda model, x: model(x).sum(), mesh=64)
    assert planned.peak == SAME(with_values.peak)


def test_a_batch_may_be_a_function_and_a_step_have_several_micro_batches() -> None:
    one = _stack(batch=lambda: torch.empty(256, 64))
    assert one.peak == _stack().peak
    assert _stack(micro_batches=3).peak == SAME(one.peak + one.categories[Category.SHARDS])


def test_shard_gets_the_mesh_if_it_takes_it() -> None:
    seen: list[Any] = []

    def with_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
        seen.append(tuple(mesh.shape))
        shard_blocks(model, mesh)

    assert _stack(mesh=(4, 8), shard=with_mesh).name == "4x8"
    assert seen == [(4, 8)]
    assert _stack(shard=lambda model: fully_shard(model)).peak > _stack().peak


def test_a_report_names_the_peak_its_place_and_what_it_is_made_of() -> None:
    planned = _stack()
    text = str(planned)
    assert text.startswith(f"{planned.peak / 2**20:.2f} MiB at most in a step, on each of 8 ranks")
    assert "reached in backward" in text
    assert "activations" in text
    assert planned.fits(planned.peak)
    assert not planned.fits(planned.peak - 1)


def test_an_operator_without_a_function_for_tensors_without_data_is_named() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(torch.ops.plan_unknown.op(x)).sum()

    with torch.library._scoped_library("plan_unknown", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x.clone(), "CPU")
        with pytest.raises(PlanError, match=r"plan_unknown\.op\.default .*register_fake"):
            plan(stack, torch.empty(2, 64), loss, mesh=2)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"mesh": 0}, ValueError, "each size must be at least 1"),
        ({"mesh": (2, 2, 2)}, TypeError, "pass a number of ranks"),
        ({"mesh": "8"}, TypeError, "pass a number of ranks"),
        ({"micro_batches": 0}, ValueError, "pass a positive int"),
        (
            {"mesh": (2, 4), "shard": lambda model: fully_shard(model)},
            ValueError,
            "shard takes no mesh=",
        ),
        ({"device": "z900"}, ValueError, "pass one of a100"),
    ],
)
def test_what_cannot_be_planned_is_said_before_anything_is_built(
    wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        _stack(**wrong)


def test_a_loss_that_is_no_scalar_is_refused_and_leaves_no_world() -> None:
    for loss in (lambda model, x: model(x), lambda model, x: 1.0):
        with pytest.raises((TypeError, ValueError), match="loss returned a"):
            plan(stack, torch.empty(2, 64), loss, mesh=2)  # type: ignore[arg-type]
        assert not dist.is_initialized()


def test_what_is_no_optimizer_is_refused_and_leaves_no_world() -> None:
    with pytest.raises(TypeError, match="optimizer returned a int"):
        _stack(mesh=2, optimizer=lambda parameters: 3)
    assert not dist.is_initialized()


@distributed(2)
def test_in_a_process_group_it_says_where_to_plan() -> None:
    with pytest.raises(RuntimeError, match="plan before init_process_group"):
        _stack()
