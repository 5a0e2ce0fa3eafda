"""A mesh of one rank is an ordinary input: the bits of the unsharded model, and nothing is sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

from fullshard.policies import MixedPrecisionPolicy
from support.apart import private_memory
from support.parity.compare import EXACT, assert_equal, gradients_of, parameters_of
from support.parity.engines import shard, tell
from support.parity.models import CASES, build
from support.parity.reference import ByHand, adamw, compare, train, whole_batch
from support.products import few
from support.ranks import cpu_mesh, distributed


def _alone() -> DeviceMesh:
    """A mesh of this rank only, as one axis of a mesh of all; no process group of its own pool."""
    return cpu_mesh((dist.get_world_size(), 1), ("others", "alone"))["alone"]


@pytest.mark.parametrize(
    "name",
    few(
        sorted(CASES.keys() - {"many-dtypes"}),
        "lora",
        "partly-used",
        "transformer-nested",
        "uneven",
    ),
)
@distributed(2)
def test_training_is_bit_equal_to_the_unsharded_model(name: str) -> None:
    case = CASES[name]
    want = train(build(case), case, whole_batch, steps=3)
    for reshard in (True, False, None):
        model = shard(case, mesh=_alone(), reshard_after_forward=reshard)
        got = train(model, case, whole_batch, steps=3)
        compare(got, want, EXACT, average=False)


@distributed(2)
def test_mixed_precision_and_accumulation_are_bit_equal_to_the_definition() -> None:
    case = CASES["transformer"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(case, mesh=_alone(), mp_policy=policy)
    reference = ByHand(case, 1, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for step in range(4):
        tell(model, "set_requires_gradient_sync", step == 3)
        inputs, targets = case.batch(step, torch.float32)
        case.loss(model(inputs), targets).backward()
        reference.backward(step, synchronise=step == 3)
    assert_equal(gradients_of(model), gradients_of(reference.masters), EXACT, "gradients")


@distributed(2)
def test_many_dtypes_in_one_group_need_no_peer() -> None:
    case = CASES["many-dtypes"]
    model, reference = shard(case, dtype=None, mesh=_alone()), ByHand(case, 1, dtype=None)
    inputs, targets = case.batch(0, torch.float32)
    case.loss(model(inputs), targets).backward()
    reference.backward(0)
    assert_equal(gradients_of(model), gradients_of(reference.masters), EXACT, "gradients")
    assert_equal(parameters_of(model), parameters_of(reference.masters), EXACT, "parameters")


def _sent(model: nn.Module) -> int:
    """The collectives of one step."""
    case = CASES["partly-used"]
    inputs, targets = case.batch(0, torch.float32)
    with CommDebugMode() as sent:
        case.loss(model(inputs), targets).backward()
        adamw(model).step()
    return int(sent.get_total_counts())


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the counter's own hooks
@distributed(2)
def test_one_rank_sends_nothing() -> None:
    all_ranks, alone = shard(CASES["partly-used"]), shard(CASES["partly-used"], mesh=_alone())
    with private_memory():
        assert _sent(all_ranks) > 0  # so that the counter is known to count
    assert _sent(alone) == 0
