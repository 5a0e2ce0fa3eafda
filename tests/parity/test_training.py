"""Training a sharded model equals training the unsharded one on the whole batch, in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from support.parity.compare import EXACT, assert_equal, gradients_of, parameters_of, rounding
from support.parity.engines import shard
from support.parity.models import CASES, Case, PartlyUsed, build
from support.parity.reference import (
    ByHand,
    Pair,
    adamw,
    compare,
    my_rows,
    rows_of,
    train,
    whole_batch,
)
from support.products import few
from support.ranks import cpu_mesh, distributed

# BatchNorm sees the rows of its rank, many-dtypes adds in bf16: both are compared by hand below.
WHOLE_BATCH = sorted(CASES.keys() - {"batch-norm", "many-dtypes"})


@pytest.mark.parametrize("name", few(WHOLE_BATCH, "transformer", "tied-across-groups", "lora"))
@distributed(2, 4, matrix=[4])
def test_ten_steps_of_adamw_equal_those_on_the_whole_batch(name: str, world_size: int) -> None:
    case = CASES[name]
    got = train(shard(case), case, my_rows(), steps=10)
    compare(got, train(build(case), case, whole_batch, steps=10), rounding(world_size))


@pytest.mark.parametrize("name", WHOLE_BATCH)
@distributed(2)
def test_in_float64_they_are_equal_to_fourteen_digits(name: str, world_size: int) -> None:
    case, dtype = CASES[name], torch.float64
    got = train(shard(case, dtype=dtype), case, my_rows(), steps=3, dtype=dtype)
    want = train(build(case, dtype), case, whole_batch, steps=3, dtype=dtype)
    compare(got, want, rounding(world_size))


@pytest.mark.device(paces=True)
@distributed(2, 4)
def test_sums_without_rounding_are_bit_equal_to_the_whole_batch(world_size: int) -> None:
    model, whole = _integers(), _integers()
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x = torch.randint(-4, 5, (8, 5), generator=generator).float()
        model(x[my_rows()]).sum().backward()
        (whole(x).sum() / world_size).backward()
    assert_equal(gradients_of(model), gradients_of(whole), EXACT, "gradients")


def _integers() -> nn.Sequential:
    """Weights, inputs and so all sums are small integers: any order of additions is exact."""
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))
    return model


@distributed(2, 4)
def test_batch_norm_trains_on_its_rank_and_its_buffers_stay_there(world_size: int) -> None:
    case = CASES["batch-norm"]
    model = shard(case)
    reference = ByHand(case, world_size)
    ours, theirs = adamw(model), adamw(reference.masters)
    for step in range(10):
        inputs, targets = rows_of(case.batch(step, torch.float32), my_rows())
        loss = case.loss(model(inputs), targets)
        loss.backward()
        reference.backward(step)
        allowed = rounding(world_size, steps=step + 1)
        mine = reference.losses[dist.get_rank()]
        assert_equal({"loss": loss.detach()}, {"loss": mine}, allowed, f"loss {step}")
        got, want = gradients_of(model), gradients_of(reference.masters)
        assert_equal(got, want, allowed, f"gradients {step}")
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    buffers = dict(model.named_buffers())
    assert not any(isinstance(buffer, DTensor) for buffer in buffers.values())
    replica = reference.replicas[dist.get_rank()]
    assert_equal(buffers, dict(replica.named_buffers()), allowed, "buffers")
    assert buffers["calls"].item() == 10


@distributed(2, 4, matrix=[4])
def test_many_dtypes_in_one_group_each_reduce_in_their_own(world_size: int) -> None:
    case = CASES["many-dtypes"]
    model = shard(case, dtype=None)
    reference = ByHand(case, world_size, dtype=None)
    for step in range(3):
        inputs, targets = rows_of(case.batch(step, torch.float32), my_rows())
        loss = case.loss(model(inputs), targets)
        loss.backward()
        reference.backward(step)
        assert torch.equal(loss, reference.losses[dist.get_rank()])
        # one addition is the same in either order; of three, only the order that the backend takes
        allowed = EXACT if world_size == 2 else rounding(world_size)
        assert_equal(gradients_of(model), gradients_of(reference.masters), allowed, f"step {step}")
    dtypes = {n: None if g is None else g.dtype for n, g in gradients_of(model).items()}
    assert dtypes == {
        "single": torch.float32,
        "brain": torch.bfloat16,
        "sixteen": torch.float16,
        "frozen": None,
        "permutation": None,
    }
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
    torch.optim.SGD([p for p in reference.masters.parameters() if p.requires_grad], lr=0.5).step()
    assert_equal(parameters_of(model), parameters_of(reference.masters), allowed, "parameters")


@pytest.mark.cross
@pytest.mark.parametrize("user", [0, 1])
@pytest.mark.parametrize("mixed", [False, True])
@distributed(2, 4)
def test_a_parameter_that_one_rank_uses_gets_its_gradient_on_every_rank(
    user: int, mixed: bool, world_size: int
) -> None:
    case = CASES["partly-used"]
    dtypes = (torch.bfloat16, torch.float32) if mixed else (None, None)
    policy = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    model = shard(case, mp_policy=policy)
    reference = ByHand(case, world_size, param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    for step in range(3):
        # The user changes from step to step, and in the last nobody uses the branch.
        for rank, replica in enumerate(reference.replicas):
            assert isinstance(replica, PartlyUsed)
            replica.with_branch = step < 2 and rank == (user + step) % world_size
        mine = reference.replicas[dist.get_rank()]
        assert isinstance(model, PartlyUsed)
        assert isinstance(mine, PartlyUsed)
        model.with_branch = mine.with_branch
        inputs, targets = rows_of(case.batch(step, torch.float32), my_rows())
        case.loss(model(inputs), targets).backward()
        reference.backward(step)
        got, want = gradients_of(model), gradients_of(reference.masters)
        assert (want["branch.weight"] is None) == (step == 2)
        assert_equal(got, want, EXACT if world_size == 2 else rounding(world_size), f"step {step}")
        model.zero_grad()
        reference.masters.zero_grad()


def _columns(columns: int) -> nn.Sequential:
    """A convolution whose kernel has so many columns."""
    return nn.Sequential(
        nn.Conv1d(2, 3, columns), nn.ReLU(), nn.AdaptiveAvgPool1d(5), nn.Linear(5, 3)
    )


def _transposed() -> nn.Sequential:
    """A layer whose weight is not contiguous."""
    first = nn.Linear(9, 7)
    first.weight = nn.Parameter(torch.randn(9, 7).t())
    return nn.Sequential(first, nn.Tanh(), nn.Linear(7, 2))


PLACED: dict[str, tuple[Callable[[], nn.Sequential], int]] = {
    **{f"{columns} columns": (partial(_columns, columns), -1) for columns in (6, 4, 3, 1)},
    "transposed": (_transposed, 0),
    "columns of a transposed one": (_transposed, 1),
}


@pytest.mark.cross
@pytest.mark.parametrize("name", PLACED)
@distributed(2, 4)
def test_parameters_cut_along_any_dim_and_of_any_strides_equal_the_whole_batch(name: str) -> None:
    make, dim = PLACED[name]
    x = torch.randn(8, 2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    case = Case(
        make=make,
        units=("0",),
        batch=lambda index, dtype: (x, x),
        loss=lambda output, _: output.square().mean(),
    )

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(dim % parameter.ndim) if parameter.ndim > 1 else None

    pair = Pair(case, shard(case, dtype=torch.float64, shard_placement_fn=placement))
    assert pair.whole.get_parameter("0.weight").is_contiguous() == ("transposed" not in name)
    weight = pair.model.get_parameter("0.weight")
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(dim % weight.ndim),)
    for step in range(3):
        pair.backward(step)
        pair.check(step + 1)
        pair.step()
    pair.check(3)
