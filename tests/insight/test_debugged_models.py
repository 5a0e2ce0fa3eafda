"""Debug mode of sharded models: who is where when ranks diverge, and copies that are stale."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.comm import CollectiveMismatchError, DefaultAllGather
from fullshard.insight import debug_mode, set_debug_mode
from fullshard.insight.debugging import is_debugging
from fullshard.insight.gather_checks import _checksum
from fullshard.policies import CPUOffloadPolicy
from fullshard.sharding import FSDPModule, ShardingPlacements, fully_shard
from support.modules import Assembled
from support.products import few
from support.ranks import cpu_mesh, distributed
from support.surface.ranks import everyone
from support.wide.model import Stack, loss_of, make_batch, make_stack

AGES = 1000.0  # seconds; a test that waited so long would fail by pytest's timeout


def sharded(**kwargs: Any) -> Any:
    """Three blocks and a root, the same on every rank."""
    model = make_stack()
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def part(step: int = 0) -> torch.Tensor:
    world_size = dist.get_world_size()
    return make_batch(world_size, step).chunk(world_size)[dist.get_rank()]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of those that there are, and none left behind."""
    found = []
    for param in model.parameters():
        gradient: Any = param.grad
        if gradient is not None:
            found.append(gradient.to_local().clone())
        param.grad = None
    return found


def step(model: Any, number: int = 0) -> list[torch.Tensor]:
    loss_of(model, part(number)).backward()
    return gradients(model)


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@contextlib.contextmanager
def raising(module: nn.Module, error: Exception, after: float = 0.0) -> Iterator[None]:
    """A context in which the forward of ``module`` raises after its parameters were gathered.

    ``after``: seconds that pass before it does.
    """

    def hook(module: nn.Module, args: object) -> None:
        time.sleep(after)
        raise error

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def diverges(model: Any, run: Callable[[], object], *others: type[Exception]) -> str:
    """The report of ``run``, the same on every rank that raises it; then the model is as new.

    ``others``: what a rank may raise instead.
    """
    with pytest.raises((CollectiveMismatchError, *others)) as caught:
        run()
    model.reset_iter_state()
    text = str(caught.value) if caught.errisinstance(CollectiveMismatchError) else ""
    (report,) = {each for each in everyone(text) if each}
    return report


class _Skips(Stack):
    """A stack that skips a block, or swaps two, when it is told to."""

    order = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        out: torch.Tensor = self.head(x)
        return out


def skipping() -> Any:
    torch.manual_seed(0)
    model = _Skips(3)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


# -- ranks that diverge ---------------------------------------------------------------------------


def _is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def in_order(model: Any, order: tuple[int, ...]) -> None:
    """The last rank runs these blocks."""
    model.order = order if _is_last() else (0, 1, 2)
    try:
        step(model)
    finally:
        model.order = (0, 1, 2)


def one_forward_more(model: Any) -> None:
    """Rank 0 runs another forward while the others begin their backward."""
    loss = loss_of(model, part())
    if dist.get_rank() == 0:
        model(part())
    loss.backward()


def bad_batch(model: Any) -> None:
    failure = raising(model.blocks[1], ValueError("bad batch"))
    with failure if _is_last() else contextlib.nullcontext():
        step(model)


def prefetch_alone(model: Any) -> None:
    if dist.get_rank() == 0:
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
    try:
        step(model)
    finally:
        model.blocks[0].set_modules_to_forward_prefetch([])


def reduce_alone(model: Any) -> None:
    model.set_requires_gradient_sync(dist.get_rank() == 0)
    try:
        step(model)
    finally:
        model.set_requires_gradient_sync(True)


BLOCK_1, BLOCK_2 = "{others} gather{s} blocks.1", "rank {last} gathers blocks.2."
DIVERGENCES: dict[str, tuple[Callable[[], Any], Callable[[Any], None], tuple[str, ...]]] = {
    "skipped": (skipping, partial(in_order, order=(0, 2)), (f"{BLOCK_1}, {BLOCK_2}",)),
    "a gather meets another": (
        sharded,
        one_forward_more,
        ("rank 0 gathers (root), {rest} gather{s} blocks.2.",),
    ),
    "a gather meets a reduction": (
        partial(sharded, reshard_after_forward=False),  # so that a backward reduces first
        one_forward_more,
        ("rank 0 gathers (root), {rest} reduce{s} blocks.2.",),
    ),
    "a forward raises": (
        sharded,
        bad_batch,
        (
            "rank {last} raised ValueError: bad batch, after its last collective: ",
            "gathered blocks.1. Meanwhile ",
        ),
    ),
    "a prefetch": (sharded, prefetch_alone, ("rank 0 gathers blocks.2, rank", "blocks.1.")),
    "a reduction left out": (
        sharded,
        reduce_alone,
        ("rank 0 reduces blocks.2, {rest} gather{s} blocks.0.",),
    ),
}


@pytest.mark.cross
@pytest.mark.parametrize("name", DIVERGENCES)
@distributed(2, 4, matrix=[4])
def test_a_divergence_is_named_on_every_rank_and_all_go_on(name: str, world_size: int) -> None:
    make, run, words = DIVERGENCES[name]
    model, last = make(), world_size - 1
    wanted = step(model)
    several = world_size > 2
    named = {
        "last": last,
        "others": f"ranks 0-{last - 1}" if several else "rank 0",
        "rest": f"ranks 1-{last}" if several else "rank 1",
        "s": "" if several else "s",
    }
    with debug_mode(timeout=AGES):
        assert equal(step(model), wanted)
        for _ in range(2):  # twice, as the first must leave nothing behind
            report = diverges(model, lambda: run(model), ValueError)
            gradients(model)
            assert equal(step(model), wanted)
    for word in words:
        assert word.format(**named) in report


@distributed(2)
def test_a_backward_that_raises_on_one_rank_ends_it_on_all() -> None:
    model = sharded()
    wanted = step(model)

    def run() -> None:
        with debug_mode(timeout=AGES):
            x = part().requires_grad_()
            hidden = model.blocks[0](x)

            def fail(gradient: torch.Tensor) -> None:
                raise ArithmeticError("overflow")

            if dist.get_rank() == 0:
                hidden.register_hook(fail)
            model(hidden).sum().backward()

    step(model)
    report = diverges(model, run, ArithmeticError)
    assert "rank 0 raised ArithmeticError: overflow, after its last collective: " in report
    with debug_mode(timeout=AGES):
        assert equal(step(model), wanted)


@distributed(2)
def test_a_backward_whose_error_is_handled_is_told_by_the_reset() -> None:
    model = sharded()
    wanted = step(model)

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("overflow")

    def run() -> None:
        hook = model.blocks[1].register_forward_hook(
            lambda module, args, out: out.register_hook(fail) and None
        )
        if dist.get_rank() == 1:
            hook.remove()
        loss = loss_of(model, part())
        hook.remove()
        try:
            loss.backward()
        except ArithmeticError:
            model.reset_iter_state()  # inside the context, so that nothing else could tell
            raise

    with debug_mode(timeout=AGES):
        report = diverges(model, run, ArithmeticError)
        assert equal(step(model), wanted)
    assert "rank 0 raised ArithmeticError: overflow, after" in report


@pytest.mark.parametrize("late", [False, True])
@distributed(4)
def test_ranks_of_another_shard_group_of_a_hybrid_mesh_hear_of_it_too(late: bool) -> None:
    """If rank 3 is late, others have reduced a group that it has not, and reset all the same."""
    model = sharded(mesh=cpu_mesh((2, 2), ("replicate", "shard")))
    wanted = step(model)
    guilty = dist.get_rank() == 3
    with debug_mode(timeout=AGES):
        failure = raising(model.blocks[1], ValueError("bad batch"), after=0.5 if late else 0.0)
        with failure if guilty else contextlib.nullcontext():
            with pytest.raises((ValueError, CollectiveMismatchError)) as caught:
                step(model)
            model.reset_iter_state()
        assert guilty or "rank 3 raised ValueError: bad batch" in str(caught.value)
        dist.barrier()
        assert equal(step(model), wanted)


# -- ranks that do not ----------------------------------------------------------------------------


class _Own(DefaultAllGather):
    """A collective of a user's own."""


@pytest.mark.cross
@distributed(2, 4, matrix=[4])
@pytest.mark.parametrize(
    "kind",
    few(
        ["plain", "kept", "smaller", "own", "prefetched", "offloaded", "hybrid"],
        "plain",
        "kept",
        "own",
        "hybrid",
    ),
)
def test_a_run_without_errors_is_the_same_to_the_last_bit(kind: str) -> None:
    results = []
    for debug in (False, True):
        torch.manual_seed(0)
        kwargs: dict[str, Any] = {}
        if kind == "kept":
            kwargs["reshard_after_forward"] = False
        elif kind == "smaller":
            kwargs["reshard_after_forward"] = dist.get_world_size() // 2
        elif kind == "hybrid":
            kwargs["mesh"] = cpu_mesh((dist.get_world_size() // 2, 2), ("replicate", "shard"))
        elif kind == "offloaded":
            kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        model = sharded(**kwargs)
        if kind == "own":
            model.blocks[1].set_custom_all_gather(_Own())
        elif kind == "prefetched":
            model.blocks[0].set_modules_to_forward_prefetch(list(model.blocks[1:]))
        results.append(_train(model, debug))
    assert equal(*results)


def _train(model: Any, debug: bool) -> list[torch.Tensor]:
    """Parameters after steps with accumulation, and a forward without gradients."""
    set_debug_mode(debug, timeout=AGES)
    assert is_debugging() == debug
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(3):
        model.set_requires_gradient_sync(number != 0)
        loss_of(model, part(number)).backward()
        if number:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(part(number))
    set_debug_mode(False)
    reshard(model)
    return [param.to_local().detach().clone() for param in model.parameters()]


@distributed(2)
def test_recomputations_that_end_by_an_exception_are_no_departures() -> None:
    model = sharded()
    wanted = step(model)
    for block in model.blocks:
        plain = type(block).forward

        def forward(x: torch.Tensor, plain: Any = plain, block: Any = block) -> Any:
            return checkpoint(plain, block, x, use_reentrant=False)

        block.forward = forward
    with debug_mode(timeout=AGES):
        for _ in range(2):
            assert equal(step(model), wanted)


@distributed(2)
def test_a_reset_without_an_error_and_an_error_inside_the_forward_are_no_departures() -> None:
    model = sharded()
    wanted = step(model)

    def careful(model: Any, x: torch.Tensor) -> torch.Tensor:
        failure = raising(model.inner, ValueError("handled"))
        raises = failure if dist.get_rank() == 0 else contextlib.nullcontext()
        with raises, contextlib.suppress(ValueError):
            model.inner(x)
        out: torch.Tensor = model.inner(x)
        return out

    with debug_mode(timeout=AGES):
        if dist.get_rank() == 0:
            model.reset_iter_state()
        assert equal(step(model), wanted)
        root: Any = fully_shard(Assembled(careful, inner=fully_shard(make_stack().blocks[0])))
        for _ in range(2):
            root(part()).sum().backward()


@distributed(2)
def test_an_exception_that_all_ranks_raise_needs_no_more_than_a_reset() -> None:
    model = sharded()
    wanted = step(model)
    with debug_mode(timeout=AGES):
        for _ in range(2):
            with raising(model.blocks[1], ValueError("bad batch")), pytest.raises(ValueError):
                step(model)
            model.reset_iter_state()
            assert equal(step(model), wanted)


# -- stale copies ---------------------------------------------------------------------------------

CHANGED = "blocks.1.up.weight"
STALE = r"blocks\.1\.up\.weight changed while .* call parameters_changed\(\)"


def changer(model: nn.Module) -> Callable[[], None]:
    """A function that changes a parameter as no optimizer does; made while that is sharded."""
    param: Any = dict(model.named_parameters())[CHANGED]

    def change() -> None:
        with torch.no_grad():
            param.to_local().mul_(-1)

    return change


@distributed(4)
@pytest.mark.parametrize(
    "kept", ["after forward", "by the user", "over few ranks", "over the first level"]
)
def test_a_kept_copy_of_parameters_changed_by_hand_is_found(kept: str) -> None:
    kwargs: dict[str, Any] = {}
    if kept == "after forward":
        kwargs["reshard_after_forward"] = False
    elif kept == "over few ranks":
        kwargs["reshard_after_forward"] = 2
    elif kept == "over the first level":
        kwargs["mesh"] = cpu_mesh((2, 2), ("outer", "inner"))
        kwargs["placements"] = ShardingPlacements(compute="inner")
    model = sharded(**kwargs)
    change = changer(model)
    with debug_mode(timeout=AGES), torch.set_grad_enabled(kept.startswith("over")):
        for _ in range(2):
            loss = loss_of(model, part())  # the second finds it fresh
            if kept == "over the first level":  # within a step
                model.set_is_last_backward(False)
                loss.backward()
        if kept == "by the user":
            model.blocks[1].unshard()
        dist.barrier()  # neighbours do not wait for the others
        change()
        with pytest.raises(RuntimeError, match=STALE):  # its own error, or the others' report of it
            model(part())
        del loss
        model.reset_iter_state()
        reshard(model)
        model.parameters_changed()
        found = model(part())
    other = sharded()
    changer(other)()
    assert torch.equal(found, other(part()))


@distributed(2)
def test_what_an_optimizer_or_a_state_dict_changes_is_gathered_again_and_no_error() -> None:
    model = sharded(reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with debug_mode(timeout=AGES):
        for number in range(3):
            with torch.no_grad():
                model(part(number))
            step_loss = loss_of(model, part(number))
            step_loss.backward()
            optimizer.step()
        with torch.no_grad():
            model(part())
            model.load_state_dict(state)
            model(part())


@distributed(2)
def test_a_change_between_forward_and_backward_leaves_the_copy_to_its_graph() -> None:
    model = sharded(reshard_after_forward=False)
    wanted = step(model)
    change = changer(model)
    with debug_mode(timeout=AGES):
        loss = loss_of(model, part())
        change()
        loss.backward()
    assert equal(gradients(model), wanted)


@distributed(2)
def test_a_change_on_one_rank_is_told_to_the_others_as_an_exception_of_that_rank() -> None:
    model = sharded(reshard_after_forward=False)
    change = changer(model)
    with debug_mode(timeout=AGES), torch.no_grad():
        model(part())
        if dist.get_rank() == 1:
            change()
        model.blocks[2].reshard()  # so that something is gathered after the copy
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight changed while") as caught:
            model(part())
        model.reset_iter_state()
    assert isinstance(caught.value, CollectiveMismatchError) == (dist.get_rank() == 0)


@distributed(2)
def test_a_copy_that_was_taken_before_debug_mode_is_not_judged() -> None:
    model = sharded(reshard_after_forward=False)
    change = changer(model)
    with torch.no_grad():
        model(part())
        change()
        with debug_mode(timeout=AGES):
            model(part())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int16])
def test_a_checksum_tells_tensors_apart_whatever_changed(dtype: torch.dtype) -> None:
    shard = (torch.arange(15) % 7 > 4).to(dtype).reshape(3, 5)
    one = torch.ones((), dtype=dtype)
    others = [
        shard.clone(),
        shard.flip(0),
        shard.flip(1),
        torch.ones_like(shard),
        (shard == 0).to(dtype),
    ]
    others[0][2, 4] = one if shard[2, 4] != one else 0 * one
    sums = [tuple(_checksum(each).tolist()) for each in [shard, *others]]
    assert len(set(sums)) == len(sums)
    assert torch.equal(_checksum(shard.t().contiguous().t()), _checksum(shard))
    assert _checksum(shard[:0]).tolist() == [0, 0]
    assert _checksum(one).shape == (2,)
