"""LoRA: a frozen base of any dtype and small trainable adapters, in one group or in several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import MixedPrecisionPolicy
from support.modules import Assembled
from support.parity.compare import EXACT, assert_equal, gradients_of, parameters_of, rounding
from support.parity.engines import OURS, shard
from support.parity.models import CASES, build
from support.parity.reference import adamw, my_rows, rows_of
from support.ranks import cpu_mesh, distributed

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

CASE = CASES["lora"]


def _adapter(inputs: int, outputs: int) -> Any:
    """A frozen layer in bf16 and its adapter in fp32, which computes in fp32."""
    return Assembled(
        lambda m, x: m.base(x.bfloat16()).float() + m.up(m.down(x)),
        base=nn.Linear(inputs, outputs).bfloat16().requires_grad_(False),
        down=nn.Linear(inputs, 2, bias=False),
        up=nn.Linear(2, outputs, bias=False),
    )


def _adapted() -> nn.Sequential:
    torch.manual_seed(71)
    return nn.Sequential(_adapter(6, 9), nn.Tanh(), _adapter(9, 1))


def _backward(model: nn.Module, step: int, rows: slice) -> None:
    inputs, targets = rows_of(CASE.batch(step, torch.float32), rows)
    CASE.loss(model(inputs), targets).backward()


@pytest.mark.cross
@pytest.mark.parametrize("apart", [True, False], ids=["a-group-per-layer", "one-group"])
@distributed(2, 4, matrix=[4])
def test_a_frozen_base_in_another_dtype_trains_as_the_unsharded_model(
    apart: bool, world_size: int
) -> None:
    model, whole = _adapted(), _adapted()
    for layer in (model[0], model[2]) if apart else ():
        OURS.fully_shard(layer, mesh=cpu_mesh())
    OURS.fully_shard(model, mesh=cpu_mesh())
    base = {name: value for name, value in parameters_of(model).items() if "base" in name}
    optimizers = adamw(model), adamw(whole)
    for step in range(4):
        _backward(model, step, my_rows())
        _backward(whole, step, slice(None))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = parameters_of(model)
    # the layer in bf16 gives its input a gradient of that precision
    allowed = rounding(world_size, steps=5, dtype=torch.bfloat16)
    assert_equal(found, parameters_of(whole), allowed, "parameters")
    assert_equal({name: found[name] for name in base}, base, EXACT, "the base")


@distributed(2)
def test_what_is_frozen_is_gathered_and_never_reduced() -> None:
    model = shard(CASE)
    _backward(model, 0, my_rows())  # plans
    log = EventLog()
    with observe(log):
        _backward(model, 1, my_rows())
    assert "frozen" in log.named(EventKind.UNSHARD)
    assert "frozen" not in log.named(EventKind.REDUCE)
    trainable = sum(p.numel() for p in build(CASE).parameters() if p.requires_grad)
    everything = sum(p.numel() for p in build(CASE).parameters())
    reduced = sum(event.nbytes or 0 for event in log.of(EventKind.REDUCE_SCATTER))
    assert 4 * trainable <= reduced < 4 * everything
    for param in model.parameters():
        assert (param.grad is not None) == param.requires_grad


@distributed(2)
def test_a_base_kept_in_its_dtype_by_a_rule_computes_as_cast_by_hand() -> None:
    """The adapters compute in fp32, the base in bf16 though it is stored in fp32."""
    policy = MixedPrecisionPolicy(
        reduce_dtype=torch.float32, param_dtypes={"*base*": torch.bfloat16}
    )
    model, whole = _adapted(), _adapted()
    for layer in (model[0], model[2]):
        base: Any = layer.get_submodule("base")
        base.float()  # stored in fp32: the cast back to bf16 is exact
        OURS.fully_shard(layer, mesh=cpu_mesh(), mp_policy=policy)
    OURS.fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(x), whole(x))


@distributed(2)
def test_unfreezing_and_freezing_between_steps_follows_the_unsharded_model(
    world_size: int,
) -> None:
    dtype = torch.float64
    model, whole = shard(CASE, dtype=dtype), build(CASE, dtype)
    for step, trainable in enumerate((False, True, False)):
        for each, rows in ((model, my_rows()), (whole, slice(None))):
            each.zero_grad()
            each.get_submodule("first.base").requires_grad_(trainable)
            inputs, targets = rows_of(CASE.batch(step, dtype), rows)
            CASE.loss(each(inputs), targets).backward()
        found = gradients_of(model)
        assert (found["first.base.weight"] is not None) == trainable
        assert_equal(found, gradients_of(whole), rounding(world_size), f"step {step}")
