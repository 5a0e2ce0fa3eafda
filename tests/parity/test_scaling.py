"""What gradients are divided by, against the unsharded model times the right number."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support.parity.compare import assert_equal, gradients_of, rounding
from support.parity.engines import shard, tell
from support.parity.models import CASES, build
from support.parity.reference import my_rows, rows_of
from support.ranks import distributed


@pytest.mark.cross
@pytest.mark.parametrize("factor", [1, 3.0, 8])
@distributed(2, 4)
def test_a_divide_factor_holds_for_its_own_module_only(factor: float, world_size: int) -> None:
    case, dtype = CASES["uneven"], torch.float64
    model, whole = shard(case, dtype=dtype), build(case, dtype)
    tell(model.get_submodule("second"), "set_gradient_divide_factor", factor)
    for _ in range(2):
        inputs, targets = rows_of(case.batch(0, dtype), my_rows())
        case.loss(model(inputs), targets).backward()
    inputs, targets = case.batch(0, dtype)
    (2 * case.loss(whole(inputs), targets)).backward()
    for parameter in whole.get_submodule("second").parameters():
        assert parameter.grad is not None
        parameter.grad *= dist.get_world_size() / factor
    assert_equal(gradients_of(model), gradients_of(whole), rounding(world_size), "gradients")
