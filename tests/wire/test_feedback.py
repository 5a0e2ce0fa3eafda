"""Error feedback: what quantising loses of a gradient arrives later, whatever a program does."""

from __future__ import annotations

import copy
import dataclasses
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.comm import (
    DefaultReduceScatter,
    Layout,
    ReduceConfig,
    TensorSpec,
    reduction_scaling,
)
from fullshard.policies import MixedPrecisionPolicy
from fullshard.samehost import AllToAllTransport
from fullshard.sharding import fully_shard
from fullshard.sharding.params.lookup import owner_of
from fullshard.wire import ErrorFeedback, Quantised, WidenedReducePlan, WirePolicy
from fullshard.wire.blocks import BlockSpec, in_blocks
from fullshard.wire.feedback import Residual
from support.collectives import reduce_config, shard_of
from support.narrow import WIDTH, Net, assert_replicas_equal, batch, full, sharded, train
from support.ranks import distributed
from support.surface.ranks import assert_equal_state, full_parameters
from support.threads.ranks import ThreadRank, run_on_threads

INT8, FP32 = torch.int8, torch.float32
CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
STEPS = {torch.int8: 254.0, torch.float8_e4m3fn: 28.0, torch.float8_e5m2: 14.0}
SHAPES = [((5, 33), 0), ((5, 70), 1), ((100,), 0), ((3, 4, 20), 1), ((2, 3, 48), 2), ((0, 3), 0)]


def policy_of(feedback: ErrorFeedback | None, **options: Any) -> WirePolicy:
    form = Quantised(INT8, 16, feedback=feedback, **options)
    return WirePolicy(reductions=form, exact=("*.1.weight", "*.bias"))


def residuals_of(net: nn.Module) -> dict[str, Residual]:
    """Those of parameters that travel in blocks, by name."""
    found = {}
    for name, param in net.named_parameters():
        owner = owner_of(param)
        assert owner is not None
        residual = getattr(owner.grad_sent, "residual", None)
        if residual is not None:
            found[name] = residual
    return found


def kept(net: nn.Module) -> dict[str, torch.Tensor]:
    """What is carried to the next step, copied."""
    found = {}
    for name, residual in residuals_of(net).items():
        now = residual.changed or residual.kept
        assert now is not None
        found[name] = now.numbers.clone()
    return found


def followed(
    feedback: ErrorFeedback, scaler: torch.amp.GradScaler | None = None, **options: Any
) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded net and its optimizer, which ``feedback`` follows."""
    net = sharded(wire_policy=policy_of(feedback))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, **options)
    feedback.follow(net, optimizer, scaler)
    return net, optimizer


def config_of(group: Any, dtype: torch.dtype) -> ReduceConfig:
    scaling = reduction_scaling(group.size(), dtype, averages=False, divide_factor=1.0)
    return reduce_config(group, DefaultReduceScatter(transport=AllToAllTransport()), scaling)


def as_laid(residual: Residual, form: BlockSpec) -> torch.Tensor:
    """A residual in the shape of its tensor, in fp64."""
    spec = form.arrives_as
    if residual.kept is None:
        return torch.zeros(spec.shape, dtype=torch.float64)
    shards, flat = [], residual.kept.numbers.double()
    for rank in range(form.ranks):
        shape = spec.shard_shape(rank, form.ranks)
        part, flat = flat.tensor_split((torch.Size(shape).numel(),))
        shards.append(part.view(shape))
    return torch.cat([shard for shard in shards if shard.numel()] or shards[:1], spec.dim)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(CODES)), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([None, 3]),
    st.integers(1, 4),
    st.integers(0, 999),
)
def test_what_arrived_and_what_is_kept_is_the_sum_of_all_gradients(
    drawn: list[tuple[tuple[tuple[int, ...], int], torch.dtype]],
    dtype: torch.dtype,
    draws: int | None,
    world: int,
    seed: int,
) -> None:
    """Whatever is missing on some rank; in bf16 to the rounding of sums over ranks."""
    specs = [TensorSpec(shape=shape, dtype=dtype, dim=dim) for (shape, dim), _ in drawn]
    layout = Layout(specs, world, mask_numel=len(specs))

    def gradients(rank: int, step: int) -> list[torch.Tensor | None]:
        generator = torch.Generator().manual_seed((seed * 64 + rank) * 64 + step)
        found: list[torch.Tensor | None] = []
        for spec in specs:
            size = 10.0 ** torch.randint(-5, 1, spec.shape, generator=generator)
            there = torch.rand((), generator=generator).item() < 0.8
            gradient = (torch.randn(spec.shape, generator=generator) * size).to(dtype)
            found.append(gradient if there else None)
        return found

    def body(rank: ThreadRank) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        feedback = ErrorFeedback(FP32)
        forms = [
            in_blocks(spec, Quantised(code, 16, seed=draws, feedback=feedback), world)
            for spec, (_, code) in zip(specs, drawn, strict=True)
        ]
        plan = WidenedReducePlan(layout, forms, config_of(rank.group, dtype))
        sums = [torch.zeros(spec.shard_shape(rank.rank, world)).double() for spec in specs]
        for step in range(5):
            for total, shard in zip(
                sums, plan.launch(gradients(rank.rank, step)).wait().shards, strict=True
            ):
                total += shard
        left = [
            as_laid(form.residual, form)
            if isinstance(form, BlockSpec) and form.residual is not None
            else torch.zeros(form.arrives_as.shape).double()
            for form in forms
        ]
        return sums, left

    ranks = run_on_threads(body, world)
    for index, spec in enumerate(specs):
        given_by = [
            gradient.double()
            for rank in range(world)
            for step in range(5)
            if (gradient := gradients(rank, step)[index]) is not None
        ]
        wanted = sum(given_by, torch.zeros(spec.shape).double())
        sizes = sum((each.abs() for each in given_by), torch.zeros(spec.shape).double())
        allowed = sizes.amax() if sizes.numel() else 0.0
        allowed = allowed * (1e-5 if dtype is FP32 or world == 1 else 4e-2)
        left = torch.stack([of_rank[1][index] for of_rank in ranks]).sum(0)
        for rank, (sums, _) in enumerate(ranks):
            there = sums[index] + shard_of(left, spec, rank, world)
            off = (there - shard_of(wanted, spec, rank, world)).abs()
            assert bool((off <= allowed).all())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES[:-1]), st.sampled_from(CODES), st.integers(1, 4), st.integers(0, 99))
def test_what_is_kept_is_half_a_step_of_what_was_sent_at_most(
    shape: tuple[tuple[int, ...], int], code: torch.dtype, ranks: int, seed: int
) -> None:
    spec = TensorSpec(shape=shape[0], dtype=FP32, dim=shape[1])
    form = in_blocks(spec, Quantised(code, 16, feedback=ErrorFeedback(FP32)), ranks)
    if not isinstance(form, BlockSpec):
        return
    assert form.residual is not None
    generator = torch.Generator().manual_seed(seed)
    codes = torch.zeros(form.shape[0], 1, form.shape[1], dtype=form.dtype)
    for _ in range(6):
        gradient = torch.randn(spec.shape, generator=generator)
        sent = gradient.double() + as_laid(form.residual, form)
        form.encode_gradient(gradient, codes, 0, 1.0)
        bound = sent.abs().amax() / STEPS[code] * (1 + 1e-3)
        assert bool((as_laid(form.residual, form).abs() <= bound).all())


@distributed(2)
def test_what_is_small_beside_a_large_gradient_is_lost_without_and_arrives_with_feedback() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 64))

        def forward(self) -> torch.Tensor:
            sizes = torch.full((64,), 1e-4)
            sizes[::16] = 1.0
            return (self.weight * sizes).sum()

    def trained(feedback: ErrorFeedback | None) -> torch.Tensor:
        policy = dataclasses.replace(policy_of(feedback), exact=())
        net: Any = fully_shard(Layer(), wire_policy=policy)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for _ in range(100):
            net().backward()
            optimizer.step()
            optimizer.zero_grad()
        return full(net.weight)[:, 1]

    wanted = torch.full((4,), -100 * 1e-4)
    assert trained(None).eq(0).all()
    torch.testing.assert_close(trained(ErrorFeedback()), wanted, rtol=0, atol=1 / 254)


@pytest.mark.parametrize("fused", [False, True])
@distributed(2)
def test_a_scaler_that_skips_a_step_leaves_what_is_kept_and_changes_its_scale(fused: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    net, optimizer = followed(ErrorFeedback(FP32), scaler, fused=fused)
    before: dict[str, torch.Tensor] = {}
    scales = []
    for step in range(6):
        scales.append(scaler.get_scale())
        for part in range(2):  # of one step: the second of two may be infinite, on one rank
            bad = step == 3 and part == 1 and dist.get_rank() == 1
            loss = net(batch(2 * step + part)).square().mean() * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
            if step == 4 and part == 0:
                _check_after_a_skip(net, before, scales)
        if step == 3:
            before = {name: kept_of(each) for name, each in residuals_of(net).items()}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scales == [8.0, 8.0, 16.0, 16.0, 8.0, 8.0]


def _check_after_a_skip(net: Any, before: dict[str, torch.Tensor], scales: list[float]) -> None:
    """The first reduction after a skip began with what was there before the skipped step.

    The same gradients from a net that never made that step say so, to the last bit.
    """
    twin_feedback = ErrorFeedback(FP32)
    twin = sharded(wire_policy=policy_of(twin_feedback))
    twin.load_state_dict(net.state_dict())
    twin(batch(0))
    for name, residual in residuals_of(twin).items():
        made = residual.exchange(torch.device("cpu"), 1.0)
        made.before.copy_(before[name] * (scales[-1] / scales[-2]))
    (twin(batch(8)).square().mean() * scales[-1]).backward()
    ours, its = kept(net), kept(twin)
    assert ours.keys() == its.keys() == before.keys()
    assert all(torch.equal(ours[name], its[name]) for name in its)


@distributed(2)
def test_residuals_grow_with_the_scale_of_a_scaler() -> None:
    """A scaler whose scale doubles at each step trains as none does, as powers of two are exact."""

    def trained(scaler: torch.amp.GradScaler) -> dict[str, torch.Tensor]:
        net, optimizer = followed(ErrorFeedback(FP32), scaler)
        for step in range(5):
            scaler.scale(net(batch(step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return full_parameters(net)

    plain = trained(torch.amp.GradScaler("cpu", enabled=False))
    scaled = trained(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    assert_equal_state(plain, scaled)


@distributed(2)
def test_a_discarded_backward_is_taken_back_and_the_next_step_is_as_without_it() -> None:
    def trained(*, discards: bool) -> dict[str, torch.Tensor]:
        feedback = ErrorFeedback()
        net, optimizer = followed(feedback, momentum=0.9)
        for step in range(4):
            if discards and step in (0, 2):
                (net(batch(9)).square().mean() * 1e6).backward()
                optimizer.zero_grad()
                feedback.restore()
                with torch.no_grad():  # an evaluation changes nothing
                    net(batch(8))
            net(batch(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(net)

    assert_equal_state(trained(discards=False), trained(discards=True))


@distributed(2)
def test_following_an_optimizer_changes_no_bit_with_accumulation_either() -> None:
    def trained(*, follows: bool, synchronised: bool) -> dict[str, torch.Tensor]:
        feedback = ErrorFeedback()
        net = sharded(wire_policy=policy_of(feedback))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        if follows:
            feedback.follow(net, optimizer)
        for step in range(6):
            net.set_requires_gradient_sync(synchronised or step % 2 == 1)
            net(batch(step)).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        return full_parameters(net)

    for synchronised in (True, False):
        one = trained(follows=False, synchronised=synchronised)
        assert_equal_state(one, trained(follows=True, synchronised=synchronised))


@pytest.mark.parametrize("what", ["model", "a layer", "optimizer", "by hand"])
@distributed(2)
def test_residuals_are_dropped_when_a_state_dict_is_loaded(what: str) -> None:
    feedback = ErrorFeedback()
    net, optimizer = followed(feedback)
    net(batch()).square().mean().backward()
    optimizer.step()
    assert any(each.any() for each in kept(net).values())
    if what == "model":
        net.load_state_dict(net.state_dict())
    elif what == "a layer":
        net.blocks[1].load_state_dict(net.blocks[1].state_dict())
    elif what == "optimizer":
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        feedback.drop()
    every = residuals_of(net).values()
    assert every and all(each.kept is each.changed is None for each in every)
    net(batch()).square().mean().backward()  # and training goes on
    assert any(each.any() for each in kept(net).values())


@distributed(2)
def test_a_parameter_without_a_gradient_here_keeps_its_residual() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.none = (nn.Linear(32, 32, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
            return (self.one, self.two)[layer](x)

    policy = WirePolicy(reductions=Quantised(INT8, 16, feedback=ErrorFeedback()))
    net: Any = fully_shard(Partly(), wire_policy=policy)
    rank = dist.get_rank()
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    net(x, rank).square().mean().backward()
    mine = residuals_of(net)
    used, unused = (("one", "two"), ("two", "one"))[rank]
    assert mine["none.weight"].kept is mine[f"{unused}.weight"].kept is None
    before = kept_of(mine[f"{used}.weight"])
    assert before.any() and net.none.weight.grad is None
    net(x, 1 - rank).square().mean().backward()
    assert torch.equal(kept_of(mine[f"{used}.weight"]), before)
    assert kept_of(mine[f"{unused}.weight"]).any()


def kept_of(residual: Residual) -> torch.Tensor:
    assert residual.kept is not None
    return residual.kept.numbers.clone()


@distributed(2)
def test_a_block_that_is_not_finite_keeps_what_it_had() -> None:
    feedback = ErrorFeedback(FP32)
    form = in_blocks(
        TensorSpec(shape=(4, 32), dtype=FP32), Quantised(INT8, 16, feedback=feedback), 2
    )
    assert isinstance(form, BlockSpec) and form.residual is not None
    codes = torch.zeros(form.shape[0], 1, form.shape[1], dtype=form.dtype)
    gradient = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    form.encode_gradient(gradient, codes, 0, 1.0)
    before = as_laid(form.residual, form)
    gradient[1, 3] = float("nan")
    gradient[2, 20] = float("inf")
    form.encode_gradient(gradient, codes, 0, 1.0)
    after = as_laid(form.residual, form)
    assert torch.equal(after[1, :16], before[1, :16])
    assert torch.equal(after[2, 16:], before[2, 16:])
    assert after.isfinite().all() and not torch.equal(after[0], before[0])


@distributed(4)
def test_replicas_stay_equal_to_the_last_bit_in_any_precision() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for dtype in (torch.float32, torch.bfloat16):
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        policy = policy_of(ErrorFeedback(), seed=1)
        net = sharded(mesh=mesh, wire_policy=policy, mp_policy=precision)
        exact, _ = train(sharded(mesh=mesh, mp_policy=precision), steps=8)
        losses, _ = train(net, steps=8)
        assert abs(losses[-1] - exact[-1]) < 0.02 * exact[0]
        assert_replicas_equal(net, mesh)


@distributed(2, 3, matrix=[3])
def test_a_run_is_the_same_again_to_the_last_bit() -> None:
    runs = [train(sharded(wire_policy=policy_of(ErrorFeedback())), steps=5)[1] for _ in range(2)]
    assert_equal_state(*runs)


@distributed(2)
def test_the_memory_it_takes_is_said_before_it_is_taken_and_goes_with_the_model() -> None:
    feedback = ErrorFeedback()
    policy = policy_of(feedback)
    matrices = 3 * WIDTH * WIDTH
    assert policy.feedback_nbytes(Net(), 2) == 2 * matrices
    net = sharded(wire_policy=policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    feedback.follow(net, optimizer)
    assert policy.feedback_nbytes(net, 2) == 4 * matrices
    assert policy.feedback_nbytes(net, 1) == feedback.nbytes == 0
    net(batch())
    assert feedback.nbytes == 4 * matrices
    assert all(each.kept is None for each in residuals_of(net).values())
    for step in range(3):
        net(batch(step)).square().mean().backward()
        optimizer.step()
    taken = 0
    for each in residuals_of(net).values():
        assert each.kept is not None and each._spare is not None
        taken += each.kept.numbers.nbytes + each._spare.nbytes
    assert taken == 4 * matrices
    del net, optimizer, each
    gc.collect()
    assert feedback.nbytes == 0


def test_a_wrong_argument_is_an_error_that_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.int8; pass torch\.bfloat16 or"):
        ErrorFeedback(INT8)
    with pytest.raises(TypeError, match=r"feedback torch\.float32; pass an ErrorFeedback\(\)"):
        Quantised(INT8, feedback=FP32)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(ValueError, match="leave the feedback away"):
        WirePolicy(gathers=Quantised(INT8, feedback=ErrorFeedback()))
    net = nn.Linear(2, 2)
    optimizer, feedback = torch.optim.SGD(net.parameters()), ErrorFeedback()
    with pytest.raises(TypeError, match="got a Linear and a Linear; pass the model"):
        feedback.follow(net, net)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(TypeError, match="got the scaler 3; pass a GradScaler"):
        feedback.follow(net, optimizer, 3)
    feedback.residual(4).exchange(torch.device("cpu"), 1.0)
    assert copy.deepcopy(feedback).nbytes == 0


def test_an_optimizer_is_followed_before_the_first_backward() -> None:
    net, feedback = nn.Linear(2, 2), ErrorFeedback()
    residual = feedback.residual(4)
    residual.exchange(torch.device("cpu"), 1.0)
    with pytest.raises(RuntimeError, match="before the first backward"):
        feedback.follow(net, torch.optim.SGD(net.parameters()))
