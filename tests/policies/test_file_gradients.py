"""Gradients in files: the steps of the run without, when they are stored, errors of a disk."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.optim import OverlappedStep, OverlappedStepError, clip_grad_norm_, grad_norm
from fullshard.policies import FileOffloadPolicy, MixedPrecisionPolicy, shard_file
from fullshard.sharding import FSDPModule, NoOffload, fully_shard
from support.modules import Assembled
from support.optim import offloaded
from support.optim.offloaded import Program, adamw, are_in_file, assert_equal_runs, part, run_both
from support.ranks import distributed
from support.surface.model import batch, build, sharded
from support.surface.ranks import everyone

REDUCED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NARROW = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
PROGRAMS = {
    "accumulation and clipping": Program(micro_batches=3, clip=0.1),
    "gradients that become zeros": Program(micro_batches=2, clip=0.1, set_to_none=False),
    "reduced wider": Program(micro_batches=2, arguments={"mp_policy": REDUCED}),
    "reduced narrower": Program(arguments={"mp_policy": NARROW}),
    "closure": Program(lambda model: adamw(model, foreach=False), closure=True),
    "fused": Program(lambda model: adamw(model, fused=True)),
}


def in_file(folder: Path, **options: Any) -> FileOffloadPolicy:
    return offloaded.in_file(folder, gradients=True, **options)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [part(param.grad) for param in model.parameters()]


def assert_in_file(model: nn.Module, policy: FileOffloadPolicy) -> None:
    assert are_in_file(gradients_of(model), policy)


# -- the same steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
@distributed(2)
def test_steps_equal_those_with_gradients_in_memory(name: str, tmp_path: Path) -> None:
    program, policy = PROGRAMS[name], in_file(tmp_path)
    mine = sharded(build(), **program.arguments, offload_policy=policy)
    theirs = sharded(build(), **program.arguments)
    run_both(program, mine, theirs)
    assert_in_file(mine, policy)
    assert all(map(torch.equal, gradients_of(mine), gradients_of(theirs)))
    assert list(tmp_path.iterdir()) == []


@distributed(2)
def test_steps_of_replicas_are_equal(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    policy, program = in_file(tmp_path), Program(micro_batches=2, clip=0.1)
    mine, theirs = sharded(build(), mesh=mesh, offload_policy=policy), sharded(build(), mesh=mesh)
    run_both(program, mine, theirs)
    assert_in_file(mine, policy)


@distributed(2)
def test_steps_beside_backward_are_equal(tmp_path: Path) -> None:
    policy = in_file(tmp_path)
    mine, theirs = sharded(build(), offload_policy=policy), sharded(build())
    one, other = OverlappedStep(adamw(mine), mine), adamw(theirs)
    for step in range(3):
        for model in (mine, theirs):
            model(batch(2 * step)).square().mean().backward()
        with one.overlap():
            mine(batch(2 * step + 1)).square().mean().backward()
        theirs(batch(2 * step + 1)).square().mean().backward()
        assert_in_file(mine, policy)
        assert torch.equal(grad_norm(mine), grad_norm(theirs))
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_runs(mine, one, theirs, other)


def _fork() -> Assembled:
    """Two branches, of which a call may leave one out."""
    parts = {name: nn.Linear(8, 8) for name in ("one", "other")}
    return Assembled(lambda m, x, both: m.one(x) + (m.other(x) if both else 0), **parts)


@distributed(2)
def test_gradients_that_only_some_ranks_have_are_equal(tmp_path: Path) -> None:
    policy, both = in_file(tmp_path), torch.distributed.get_rank() == 0
    found = []
    for offload in (policy, NoOffload()):
        torch.manual_seed(0)
        model = fully_shard(_fork(), offload_policy=offload)
        for used in (both, False):
            model(torch.ones(2, 8), used).square().sum().backward()
        found.append(gradients_of(model))
        if offload is policy:
            assert_in_file(model, policy)
    assert all(map(torch.equal, *found))


# -- when they are stored -------------------------------------------------------------------------


@distributed(2)
def test_a_gradient_is_stored_before_backward_ends(tmp_path: Path) -> None:
    policy = in_file(tmp_path)
    model, stored = sharded(build(), offload_policy=policy), list[int]()
    inputs = batch().requires_grad_()
    model(batch()).square().mean().backward()
    model.zero_grad()
    before = policy._file.space.nbytes - policy._file.space.spare_bytes
    inputs.register_hook(
        lambda gradient: stored.append(
            policy._file.space.nbytes - policy._file.space.spare_bytes - before
        )
    )
    model(inputs).square().mean().backward()
    assert stored[0] > 0
    assert all(param.grad is not None for param in model.parameters())


@distributed(2)
def test_a_small_gradient_in_memory_does_not_keep_the_memory_of_its_group(tmp_path: Path) -> None:
    sizes = sorted(part(param).nbytes for param in sharded(build()).parameters())
    policy = in_file(tmp_path, min_bytes=sizes[len(sizes) // 2])
    model: Any = sharded(build(), offload_policy=policy)
    model(batch()).square().mean().backward()
    small = [each for each in gradients_of(model) if policy._file.find(each) is None]
    assert 0 < len(small) < len(sizes)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in small)


@distributed(2)
def test_a_backward_that_raises_leaves_gradients_and_no_space_in_use(tmp_path: Path) -> None:
    policy = in_file(tmp_path)
    model: Any = sharded(build(), offload_policy=policy)
    model(batch()).square().mean().backward()
    before, sizes = [each.clone() for each in gradients_of(model)], set()

    def broken(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    for _ in range(3):
        inputs = batch(1).requires_grad_()
        inputs.register_hook(broken)
        with pytest.raises(ArithmeticError):
            model(inputs).square().mean().backward()
        model.reset_iter_state()
        assert all(map(torch.equal, gradients_of(model), before))
        sizes.add(policy.statistics.file_bytes)
    assert len(sizes) == 1


# -- errors ---------------------------------------------------------------------------------------


@distributed(2)
def test_a_full_disk_is_an_error_on_all_ranks_and_loses_nothing(tmp_path: Path) -> None:
    policy = in_file(tmp_path)
    model: Any = sharded(build(), offload_policy=policy)
    expected = sharded(build())
    optimizer, other = adamw(model), adamw(expected)
    for each in (model, expected):
        each(batch()).square().mean().backward()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if torch.distributed.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (policy.statistics.file_bytes, hard))
        with pytest.raises(RuntimeError, match=r"rank 1: no space for \d+ bytes of a gradient"):
            model(batch(1)).square().mean().backward()
        everyone("together")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(model, FSDPModule)
    model.reset_iter_state()
    assert all(map(torch.equal, gradients_of(model), gradients_of(expected)))
    for each, one in ((model, optimizer), (expected, other)):
        each(batch(1)).square().mean().backward()
        one.step()
    assert_equal_runs(model, optimizer, expected, other)
    assert_in_file(model, policy)


@contextmanager
def unreadable(policy: FileOffloadPolicy, gradients: list[torch.Tensor]) -> Iterator[None]:
    """In the block, rank 1 cannot read ``gradients`` from the disk."""
    found = [policy._file.find(each) for each in gradients if each.numel()]
    addresses, advise = {each.address for each in found if each is not None}, shard_file._madvise

    def broken(address: int, nbytes: int, advice: int) -> None:
        if advice == shard_file._POPULATE_READ and address in addresses:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        advise(address, nbytes, advice)

    rank = torch.distributed.get_rank()
    with patch.object(shard_file, "_madvise", broken if rank == 1 else advise):
        yield


LOST = r"rank 1: \S+: \d+ bytes of a gradient could not be read: Input/.*zero_grad\(\)"


@pytest.mark.parametrize("announced", [False, True])
@distributed(2)
def test_an_earlier_gradient_that_cannot_be_read_is_an_error_on_all_ranks_before_the_step(
    announced: bool, tmp_path: Path
) -> None:
    policy = in_file(tmp_path, resident_mb=0, read_ahead_mb=0)
    model: Any = sharded(build(), offload_policy=policy)
    expected = sharded(build())
    optimizer, other = adamw(model), adamw(expected)

    def backward(each: Any, number: int) -> None:
        each.set_is_last_backward(number == 2 or not announced)
        each(batch(number)).square().mean().backward()

    backward(model, 0)
    if announced:  # the next backward puts them in place
        backward(model, 1)
    with unreadable(policy, gradients_of(model)):
        with pytest.raises(RuntimeError, match=LOST):
            backward(model, 2)
        everyone("together")
    attempts: list[Callable[[], object]] = [
        lambda: backward(model, 2),
        lambda: clip_grad_norm_(model, 1.0),
    ]
    for attempt in attempts:
        model.reset_iter_state()
        with pytest.raises(RuntimeError, match=LOST):  # the disk is well, but a part is missing
            attempt()
        everyone("together")
    optimizer.zero_grad()
    for each, one in ((model, optimizer), (expected, other)):
        for number in range(3):
            backward(each, number)
        clip_grad_norm_(each, 0.1)
        one.step()
    assert_equal_runs(model, optimizer, expected, other)
    assert_in_file(model, policy)


@distributed(2)
def test_clipping_raises_on_all_ranks_before_the_step_if_a_gradient_cannot_be_read(
    tmp_path: Path,
) -> None:
    policy = in_file(tmp_path, resident_mb=0, read_ahead_mb=0)
    model: Any = sharded(build(), offload_policy=policy)
    for clips in (True, False):
        model(batch()).square().mean().backward()
        with unreadable(policy, gradients_of(model)), pytest.raises(RuntimeError, match=LOST):
            _ = clip_grad_norm_(model, 0.1) if clips else grad_norm(model)
        everyone("together")
        model.zero_grad()


@distributed(2)
def test_a_step_beside_a_backward_that_lost_a_gradient_is_an_error_on_all_ranks(
    tmp_path: Path,
) -> None:
    policy = in_file(tmp_path, resident_mb=0, read_ahead_mb=0)
    model: Any = sharded(build(), offload_policy=policy)
    optimizer = OverlappedStep(adamw(model), model)
    model(batch()).square().mean().backward()
    with (
        unreadable(policy, gradients_of(model)),
        pytest.raises(RuntimeError, match=LOST),
        optimizer.overlap(),
    ):
        model(batch(1)).square().mean().backward()
    with pytest.raises(OverlappedStepError, match="load the last checkpoint"):
        optimizer.step()
    everyone("together")


@distributed(2)
def test_a_backward_whose_gradient_cannot_be_written_leaves_earlier_gradients_to_run_it_again(
    tmp_path: Path,
) -> None:
    """Also on the rank without a gradient for the part that the other rank could write."""
    policy, both = in_file(tmp_path), torch.distributed.get_rank() == 0
    found = []
    for offload in (policy, NoOffload()):
        torch.manual_seed(0)
        model = fully_shard(_fork(), offload_policy=offload)
        model(torch.ones(2, 8), both).square().sum().backward()
        if offload is policy:
            reserve = policy._file.space.reserve
            full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            with (
                patch.object(policy._file.space, "reserve", reserve if both else full),
                pytest.raises(RuntimeError, match=r"rank 1: no space for \d+ bytes of a gradient"),
            ):
                model(torch.ones(2, 8), both).square().sum().backward()
            model.reset_iter_state()
        model(torch.ones(2, 8), both).square().sum().backward()
        found.append(gradients_of(model))
    assert all(map(torch.equal, *found))


def test_a_gradient_that_cannot_be_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = in_file(tmp_path, resident_mb=0, read_ahead_mb=0)
    first, last = (policy.stage_out(torch.full((2048,), float(n))) for n in range(2))
    policy._file._dropper.submit(int).result()  # after the first was dropped
    assert policy.read_in(first) and first[0] == 0

    def broken(failed: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shard_file, "_checked", broken)
    assert not policy.read_in(last)
    assert policy.error_of(last).startswith("8192 bytes of a gradient could not be read")
    assert policy.error_of(first) == ""


def test_without_the_option_gradients_stay_in_memory(tmp_path: Path) -> None:
    policy, gradient = FileOffloadPolicy(tmp_path, min_bytes=1), torch.ones(8)
    assert policy.stage_out(gradient) is gradient
    assert not policy.stores_gradients
