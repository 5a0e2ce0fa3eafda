"""The parity core between ranks that do not share memory, as between hosts.

Training equals the unsharded model on the whole batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from support.apart import private_memory
from support.parity.compare import EXACT, assert_equal, rounding
from support.parity.engines import OURS, TORCH, shard
from support.parity.models import CASES, build
from support.parity.reference import accumulate, compare, my_rows, train, whole_batch
from support.ranks import cpu_mesh, distributed

# torch warns of outputs that are views, such as those of a linear layer given three dimensions.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

MATRIX = pytest.mark.matrix
# BatchNorm sees the rows of its rank, many-dtypes adds in bf16: no whole batch to compare with.
CORE = ("transformer", "tied-across-groups", "uneven", "partly-used")
MODELS = [*CORE, *sorted(CASES.keys() - {*CORE, "batch-norm", "many-dtypes"})]


SETTINGS: dict[str, dict[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "bf16": {"mp_policy": {"param_dtype": torch.bfloat16}},
    "bf16-fp32": {"mp_policy": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}},
    "fp32-bf16": {"mp_policy": {"reduce_dtype": torch.bfloat16}},
}


def _ours(name: str, options: dict[str, Any]) -> nn.Module:
    made = dict(options)
    if "mp_policy" in made:
        made["mp_policy"] = MixedPrecisionPolicy(**made["mp_policy"])
    return shard(CASES[name], OURS, **made)


def _marked(names: list[str], core: tuple[str, ...]) -> list[Any]:
    return [each if each in core else pytest.param(each, marks=MATRIX) for each in names]


@pytest.mark.cross
@pytest.mark.parametrize("name", _marked(MODELS, CORE))
@distributed(2, 4)
def test_training_equals_the_whole_batch(name: str, world_size: int) -> None:
    case = CASES[name]
    with private_memory():
        got = train(shard(case), case, my_rows(), steps=4)
    compare(got, train(build(case), case, whole_batch, steps=4), rounding(world_size))


@pytest.mark.parametrize("setting", _marked(sorted(SETTINGS), ("bf16-fp32", "offload")))
@distributed(2)
def test_with_these_settings_no_bit_differs_from_torchs_own(setting: str) -> None:
    """Two numbers are added alike by both, so that torch's own says what is right."""
    case, options = CASES["transformer"], SETTINGS[setting]
    with private_memory():
        got = train(_ours("transformer", options), case, my_rows(), steps=3)
    theirs = dict(options)
    if "mp_policy" in theirs:
        theirs["mp_policy"] = TORCH.mixed(**theirs["mp_policy"])
    theirs.pop("offload_policy", None)  # where a parameter lives changes no value
    want = train(shard(case, TORCH, **theirs), case, my_rows(), steps=3)
    compare(got, want, EXACT, average=False)


@distributed(4)
def test_a_hybrid_mesh_equals_the_whole_batch(world_size: int) -> None:
    case = CASES["transformer"]
    with private_memory():
        mesh: DeviceMesh = cpu_mesh((2, 2), ("replicate", "shard"))
        got = train(shard(case, mesh=mesh), case, my_rows(), steps=3)
    compare(got, train(build(case), case, whole_batch, steps=3), rounding(world_size))


@distributed(2)
def test_accumulating_over_batches_equals_one_large_one(world_size: int) -> None:
    case = CASES["transformer"]
    histories = []
    for model, rows in ((None, my_rows()), (build(case), whole_batch)):
        with private_memory():
            trained = shard(case) if model is None else model
            histories.append(accumulate(trained, case, rows, steps=4))
    for got, want in zip(*histories, strict=True):
        assert_equal(got, want, rounding(world_size, steps=4), "after accumulation")
