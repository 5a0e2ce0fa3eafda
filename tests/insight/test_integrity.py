"""Damaged numbers are found where they are damaged, and nothing else is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from elastic.campaign import campaign
from fullshard.comm import DefaultAllGather, DefaultReduceScatter
from fullshard.insight import DamagedNumbersError, IntegrityChecks, IntegrityPolicy
from fullshard.insight.integrity.checksums import checksum, checksums
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import ShardingPlacements, fully_shard
from fullshard.sharding.spi import local_shard
from support.elastic import faults
from support.elastic.faults import STAGES, DamagedReduceScatter, run_campaign
from support.ranks import cpu_mesh, distributed

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64]


def defined(tensor: torch.Tensor) -> list[int]:
    """The checksum by Python's own integers, as int64 shows it."""
    octets = tensor.numpy().tobytes() if tensor.dtype is not torch.bfloat16 else b""
    size = {torch.complex64: 4}.get(tensor.dtype, tensor.element_size())
    if tensor.dtype is torch.bfloat16:
        octets = tensor.view(torch.int16).numpy().tobytes()
    words = [
        int.from_bytes(octets[i : i + size], "little", signed=size > 1)
        for i in range(0, len(octets), size)
    ]
    sums = sum(words), sum((place + 1) * word for place, word in enumerate(words))
    return [(total + 2**63) % 2**64 - 2**63 for total in sums]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, (1 << 16) + 3])
def test_a_checksum_is_two_sums_of_the_elements_as_integers(dtype: torch.dtype, numel: int) -> None:
    tensor = (torch.randn(numel) * 100).to(dtype)
    assert checksum(tensor).tolist() == defined(tensor)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    values=st.lists(st.floats(width=32), min_size=2, max_size=40),
    data=st.data(),
)
def test_a_flipped_bit_and_two_swapped_elements_change_it(values: list[float], data: Any) -> None:
    tensor = torch.tensor(values)
    before = checksum(tensor)
    words = tensor.view(torch.int32)
    one, other = data.draw(
        st.lists(st.integers(0, len(values) - 1), min_size=2, max_size=2, unique=True)
    )
    if words[one] != words[other]:
        swapped = tensor.clone()
        swapped[one], swapped[other] = tensor[other].clone(), tensor[one].clone()
        assert not torch.equal(before, checksum(swapped))
    bit = data.draw(st.integers(0, 31))
    words[one] ^= -(2**31) if bit == 31 else 1 << bit
    assert not torch.equal(before, checksum(tensor))


@distributed(2)
def test_a_fault_at_each_stage_is_found_with_its_rank_and_tensor() -> None:
    outcome = run_campaign(cpu_mesh(), faults=4 * len(STAGES), clean=300, seed=1)
    assert outcome.missed == []
    assert outcome.found == outcome.struck and set(outcome.struck) == set(STAGES)
    assert outcome.false_alarms == 0 and outcome.comparisons >= 300


def _model(mesh: Any = None, **options: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@distributed(2)
def test_checked_steps_train_what_unchecked_ones_train() -> None:
    trained = []
    for every in (1, 2, 1000):
        model, optimizer = _model(cpu_mesh())
        checks = IntegrityChecks(model, optimizer, IntegrityPolicy(every=every))
        for step in range(4):
            checks.begin()
            assert checks.is_due == ((step + 1) % every == 0)
            loss = model(torch.full((3, 4), float(step + dist.get_rank()))).square().mean()
            loss.backward()
            checks.before_update()
            optimizer.step()
            optimizer.zero_grad()
            checks.end()
        assert (checks.comparisons > 0) == (every < 1000)
        trained.append([local_shard(param).clone() for param in model.parameters()])
    for other in trained[1:]:  # two ranks: the sum of two numbers has one order
        assert all(torch.equal(a, b) for a, b in zip(trained[0], other, strict=True))


@distributed(2)
def test_an_evaluation_before_a_checked_step_is_no_fault() -> None:
    """It leaves the root's full parameters in its modules."""
    model, optimizer = _model(cpu_mesh())
    checks = IntegrityChecks(model, optimizer, IntegrityPolicy(every=1))
    for step in range(3):
        with torch.no_grad():
            model(torch.ones(3, 4))
        checks.begin()
        model(torch.full((3, 4), float(step))).square().mean().backward()
        checks.before_update()
        optimizer.step()
        optimizer.zero_grad()
        checks.end()
    with torch.no_grad():
        model(torch.ones(3, 4))
        local_shard(optimizer.param_groups[0]["params"][-1]).mul_(2)
    with pytest.raises(DamagedNumbersError, match=r"2\.bias"):
        checks.begin()
        checks.before_update()


class _CountedGather(DefaultAllGather):
    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


class _CountedReduce(DefaultReduceScatter):
    calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)


@distributed(2)
def test_own_collectives_are_back_after_a_checked_step_also_after_an_error() -> None:
    model: Any = fully_shard(nn.Linear(4, 2), mesh=cpu_mesh())
    gather, reduce = _CountedGather(), _CountedReduce()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checks = IntegrityChecks(model, optimizer, IntegrityPolicy(every=2))
    calls = []
    for ends in (True, False, True, True, True):  # the second step ends in an error of the user's
        checks.begin()
        model(torch.ones(3, 4)).sum().backward()
        calls.append((gather.calls, reduce.calls))
        if ends:
            checks.before_update()
            checks.end()
    reductions = [reductions for _, reductions in calls]
    assert reductions == [1, 1, 2, 2, 3]  # every second step goes through checked ones
    assert calls[0][0] == calls[1][0] < calls[2][0] == calls[3][0] < calls[4][0]


@pytest.mark.parametrize("gradients", ["inner", None])
@distributed(4)
def test_shards_that_a_second_axis_cuts_again_are_no_replicas(gradients: str | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    trained = []
    for every in (1, 1000):
        torch.manual_seed(0)
        placements = ShardingPlacements(compute="inner", gradients=gradients)
        model: Any = fully_shard(nn.Linear(4, 6), mesh=mesh, placements=placements)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        checks = IntegrityChecks(model, optimizer, IntegrityPolicy(every=every))
        for step in range(2):
            checks.begin()
            for is_last in (False, True):
                model.set_is_last_backward(is_last)
                model(torch.full((3, 4), float(step + dist.get_rank()))).square().mean().backward()
            checks.before_update()
            optimizer.step()
            optimizer.zero_grad()
            checks.end()
        assert (checks.comparisons > 0) == (every == 1)
        trained.append([local_shard(param).clone() for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@distributed(4)
def test_a_replica_that_differs_is_named() -> None:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))
    model, optimizer = _model(mesh)
    checks = IntegrityChecks(model, optimizer, IntegrityPolicy(every=1, at_rest=False))
    checks.begin()
    model(torch.ones(3, 4)).sum().backward()
    checks.before_update()
    optimizer.step()
    checks.end()
    checks.begin()
    with torch.no_grad():
        if dist.get_rank() == 2:
            local_shard(list(model.parameters())[1])[1] += 1e-6
    checks.before_update()
    with pytest.raises(DamagedNumbersError) as raised:
        checks.end()
    (finding,) = raised.value.findings
    assert (finding.stage, finding.ranks, finding.tensor) == ("replicas", (2,), "0.bias")


@pytest.mark.parametrize(("value", "found"), [(2.0, False), (31.0, True), (math.nan, True)])
@distributed(2)
def test_a_loss_out_of_range_on_one_rank_stops_all_before_the_optimizer(
    value: float, found: bool
) -> None:
    model, optimizer = _model(cpu_mesh())
    policy = IntegrityPolicy(every=1000, largest_growth=10.0)
    checks = IntegrityChecks(model, optimizer, policy)
    for step in range(8):
        checks.begin()
        checks.before_update(loss=3.0 + step / 100, norm=1.0)
    checks.begin()
    mine = value if dist.get_rank() == 1 else 3.0
    if not found:
        checks.before_update(loss=mine, norm=1.0)
        return
    with pytest.raises(DamagedNumbersError, match="range of the loss, rank 1"):
        checks.before_update(loss=mine, norm=1.0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@distributed(2)
def test_the_error_of_a_first_step_says_what_was_compared(dtype: torch.dtype | None) -> None:
    model, optimizer = _model(cpu_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    checks = IntegrityChecks(model, optimizer, IntegrityPolicy(every=1))
    checks.reduce_scatter = DamagedReduceScatter
    for stage, text in {
        "sums of gradients": "sum of 0.weight, rank 1: a second addition gave other bits",
        "packed gradients": "reduction of 0.weight, rank .* has is not what rank 1 sent",
    }.items():
        faults.FAULT.__init__(stage, 1, "0.weight", 0)  # type: ignore[misc]  # a new fault
        checks.begin()
        model(torch.ones(3, 4)).sum().backward()
        with pytest.raises(DamagedNumbersError, match=text):
            checks.before_update()
    faults.FAULT.__init__()  # type: ignore[misc]  # no fault


@distributed(2)
def test_wrong_uses_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="without sharded modules"):
        plain = nn.Linear(2, 2)
        IntegrityChecks(plain, torch.optim.SGD(plain.parameters()), IntegrityPolicy())
    for wrong in ({"every": 0}, {"largest_growth": 1.0}):
        with pytest.raises(ValueError, match="pass"):
            IntegrityPolicy(**wrong)
    model, optimizer = _model(cpu_mesh())
    checks = IntegrityChecks(model, optimizer, IntegrityPolicy(every=2))
    checks.begin()
    with pytest.raises(RuntimeError, match="where is_due is true"):
        checks.twice(lambda: None)


def test_no_tensors_have_no_checksums() -> None:
    assert checksums([]).shape == (0, 2)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_of_a_thousand_faults_at_least_99_percent_are_found_and_no_clean_step_is_blamed() -> None:
    found = campaign(faults=1100, clean=10_000, rounds=1)
    assert found["faults"] >= 1000
    assert found["found"] >= 0.99 * found["faults"], found["missed"]
    assert found["comparisons"] >= 10_000 and found["false_alarms"] == 0
