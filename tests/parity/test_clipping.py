"""``torch.nn.utils.clip_grad_norm_`` on a sharded model equals it on the unsharded one."""

from __future__ import annotations

import math

import pytest
import torch

from support.parity.compare import assert_equal, full, gradients_of, rounding
from support.parity.engines import shard
from support.parity.models import CASES, build
from support.parity.reference import my_rows, rows_of
from support.ranks import distributed


# torch has no largest element of an empty shard, so the inf norm is taken where no shard is empty.
@pytest.mark.cross
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("uneven", 2.0),
        ("lora", 1.0),
        ("empty", 2.0),
        ("tied-across-groups", 2.0),
        ("tied-across-groups", math.inf),
    ],
)
@distributed(2, 4)
def test_norm_and_clipped_gradients_equal_the_unsharded(
    name: str, kind: float, world_size: int
) -> None:
    case, dtype = CASES[name], torch.float64
    model, whole = shard(case, dtype=dtype), build(case, dtype)
    inputs, targets = rows_of(case.batch(0, dtype), my_rows())
    case.loss(model(inputs), targets).backward()
    inputs, targets = case.batch(0, dtype)
    case.loss(whole(inputs), targets).backward()
    # limits that leave gradients alone, and two that do not
    for limit, foreach in ((1e6, False), (1e6, True), (0.05, False), (0.02, True)):
        got, want = (
            torch.nn.utils.clip_grad_norm_(m.parameters(), limit, kind, foreach=foreach)
            for m in (model, whole)
        )
        # a norm adds up to 64 values of a tensor, and the norms of the tensors
        allowed = rounding(world_size, steps=5)
        assert want > 0.01
        assert_equal({"norm": full(got)}, {"norm": want}, allowed, "norm")
        assert_equal(gradients_of(model), gradients_of(whole), allowed, "gradients")
