"""Mixed precision is what it is defined to be: cast, run, average in the reduce dtype."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from support.parity.compare import EXACT, Tolerance, assert_equal, gradients_of
from support.parity.engines import shard, tell
from support.parity.models import CASES
from support.parity.reference import ByHand, my_rows, rows_of
from support.products import few
from support.ranks import cpu_mesh, distributed


@dataclass(frozen=True)
class DTypes:
    """The dtypes of a run; None for the reduce dtype: that of the parameters."""

    param: torch.dtype | None
    reduce: torch.dtype | None

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.param, reduce_dtype=self.reduce)

    def reference(self, name: str, world_size: int) -> ByHand:
        return ByHand(
            CASES[name], world_size, param_dtype=self.param, reduce_dtype=self.reduce or self.param
        )

    def tolerance(self, world_size: int) -> Tolerance:
        """0 where a sum has two terms; else what another order of ``world`` terms may change."""
        if world_size == 2:
            return EXACT
        return Tolerance(units=world_size, overrides=self.reduce or self.param)


BF16_FP32 = DTypes(torch.bfloat16, torch.float32)
PRECISIONS = {
    "bf16-fp32": BF16_FP32,
    "bf16-bf16": DTypes(torch.bfloat16, None),
    "fp16-fp32": DTypes(torch.float16, torch.float32),
    "fp32-bf16": DTypes(None, torch.bfloat16),
    "fp32-fp16": DTypes(None, torch.float16),
}
MODELS = few(
    ("uneven", "transformer", "lora", "uneven-list", "tied-in-a-group", "tied-across-groups"),
    "uneven",
    "transformer",
    "lora",
)


def _backward(model: nn.Module, name: str, step: int) -> torch.Tensor:
    case = CASES[name]
    inputs, targets = rows_of(case.batch(step, torch.float32), my_rows())
    loss = case.loss(model(inputs), targets)
    loss.backward()
    return loss.detach()


@pytest.mark.cross
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
@distributed(2, 4, matrix=[4])
def test_gradients_are_cast_averaged_and_accumulated_as_defined(
    name: str, precision: str, world_size: int
) -> None:
    """Two backwards, both reduced: the second adds to the sharded gradient."""
    dtypes = PRECISIONS[precision]
    model = shard(CASES[name], mp_policy=dtypes.policy)
    reference = dtypes.reference(name, world_size)
    for step in range(2):
        loss = _backward(model, name, step)
        reference.backward(step)
        assert torch.equal(loss, reference.losses[dist.get_rank()]), f"loss at step {step}"
        got, want = gradients_of(model), gradients_of(reference.masters)
        assert_equal(got, want, dtypes.tolerance(world_size), f"gradients at step {step}")


@pytest.mark.cross
@pytest.mark.parametrize("precision", PRECISIONS)
@distributed(2, 4, matrix=[4])
def test_without_synchronisation_ranks_add_up_in_the_reduce_dtype(
    precision: str, world_size: int
) -> None:
    dtypes = PRECISIONS[precision]
    model = shard(CASES["uneven"], mp_policy=dtypes.policy)
    reference = dtypes.reference("uneven", world_size)
    for reshard in (True, False):  # the second also sees what the first leaves behind
        for micro in range(4):
            tell(model, "set_requires_gradient_sync", micro == 3)
            tell(model, "set_reshard_after_backward", reshard or micro == 3)
            _backward(model, "uneven", micro)
            reference.backward(micro, synchronise=micro == 3)
            if micro < 3:
                assert all(parameter.grad is None for parameter in reference.masters.parameters())
        got, want = gradients_of(model), gradients_of(reference.masters)
        assert_equal(got, want, dtypes.tolerance(world_size), "gradients")
        model.zero_grad()
        reference.masters.zero_grad()


@distributed(2, 4, matrix=[4])
def test_small_terms_survive_accumulation_because_it_is_not_done_in_bf16() -> None:
    """1 + 15 * 2**-9 is 1 if added up in bf16, whose eps is 2**-7."""
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=BF16_FP32.policy)
    for micro in range(16):
        tell(model, "set_requires_gradient_sync", micro == 15)
        model(torch.full((1, 1), 1.0 if micro == 0 else 2.0**-9)).sum().backward()
    gradient = gradients_of(model)["weight"]
    assert gradient is not None
    assert gradient.item() == 1 + 15 * 2.0**-9


@distributed(2, 4)
def test_fp16_gradients_whose_sum_is_out_of_range_have_a_right_mean() -> None:
    """20000 from each rank: four add up to more than 65504, the largest number of fp16."""
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    (model(torch.full((1, 1), 20000.0))).sum().backward()
    gradient = gradients_of(model)["weight"]
    assert gradient is not None
    assert gradient.item() == 20000
