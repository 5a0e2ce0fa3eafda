"""Groups that take turns in the pages of a few: values stay right, and memory stays small.

Each program runs twice, where ranks share memory and where they do not; between two ranks both add
the same numbers, so every bit must agree.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.insight import debug_mode
from fullshard.policies import DepthPrefetch
from fullshard.samehost import SharedMemoryStatistics, set_shared_frames, shared_memory_statistics
from fullshard.sharding import fully_shard, unsharded
from support.apart import private_memory
from support.modules import Assembled
from support.products import few
from support.ranks import distributed, world
from support.surface.ranks import everyone

WIDTH = 64
LAYERS = 8
LAYER = 4 * WIDTH * WIDTH  # bytes


def _run(block: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in block.inner:
        x = x + torch.tanh(layer(x)) * block.scale
    return x


def make_block(*, nested: bool, **options: Any) -> Any:
    """Four layers; with ``nested`` these are groups of their own, inside the block's."""
    inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
    for layer in inner if nested else ():
        fully_shard(layer, **options)
    return Assembled(_run, inner=inner, scale=nn.Parameter(torch.ones(WIDTH)))


def stack(**options: Any) -> Any:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(nn.Sequential(*layers), **options)


def blocks(*, nested: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    made = [make_block(nested=nested, **options) for _ in range(3)]
    for block in made:
        fully_shard(block, **options)
    return fully_shard(nn.Sequential(*made), **options)


def batch(step: int) -> torch.Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def plainly(model: Any, step: int) -> None:
    model(batch(step)).square().mean().backward()


def recomputing(model: Any, step: int) -> None:
    x = batch(step)
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    x.square().mean().backward()


def twice(model: Any, step: int) -> None:
    losses = [model(batch(step + each)).square().mean() for each in (0, 5)]
    losses[0].backward()
    losses[1].backward()


def by_hand(model: Any, step: int) -> None:
    for layer in model:
        layer.unshard(async_op=True)
    plainly(model, step)
    for layer in model:
        layer.reshard()


def opened(model: Any, step: int) -> None:
    loss = model(batch(step)).square().mean()
    with unsharded(model):
        loss.backward()


def raising(model: Any, step: int) -> None:
    """A forward that ends halfway, on all ranks."""
    handle = model[2].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(step))
    handle.remove()
    model.reset_iter_state()
    plainly(model, step)


def kept_by_one(model: Any, step: int, kept: list[torch.Tensor] = []) -> None:  # noqa: B006
    """One rank keeps the graphs of forwards that nobody follows up."""
    loss = model(batch(step + 5)).square().mean()
    if dist.get_rank() == 0:
        kept[:] = [loss]
    del loss
    plainly(model, step)
    kept.clear()


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[[Any, int], None]]] = {
    "a stack": (stack, {}, plainly),
    "two forwards": (stack, {}, twice),
    "kept until backward": (stack, {"reshard_after_forward": False}, plainly),
    "kept by one rank": (stack, {"reshard_after_forward": False}, kept_by_one),
    "three ahead": (
        stack,
        {"prefetch_policy": DepthPrefetch(forward=3, backward=3)},
        plainly,
    ),
    "groups inside groups": (blocks, {"nested": True}, plainly),
    "recomputed": (blocks, {"nested": False}, recomputing),
    "recomputed inside": (blocks, {"nested": True}, recomputing),
    "unsharded by hand": (stack, {}, by_hand),
    "opened between forward and backward": (stack, {}, opened),
    "after an exception": (stack, {}, raising),
}


def gradients(case: str) -> list[torch.Tensor]:
    """What three steps give, each of other values."""
    make, options, run = CASES[case]
    model, found = make(**options), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        run(model, step)
        found += [param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@contextmanager
def frames(count: int, kept: int | None = None) -> Iterator[None]:
    set_shared_frames(count, kept=kept)
    try:
        yield
    finally:
        set_shared_frames()


WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "one frame": lambda: frames(1),
    "two frames": lambda: frames(2),
    "given back between steps": lambda: frames(2, kept=0),
    "poisoned": debug_mode,
}


@pytest.mark.cross
@pytest.mark.parametrize(
    "case",
    few(CASES, *(CASES.keys() - {"recomputed inside", "kept until backward", "unsharded by hand"})),
)
@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_gradients_are_those_of_private_memory(way: str, case: str) -> None:
    with WAYS[way]():
        found = gradients(case)
    with private_memory():
        wanted = gradients(case)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("keeps", ["weight", "view"])
@distributed(2)
def test_in_debug_mode_a_loss_on_full_parameters_that_were_given_back_raises(keeps: str) -> None:
    model = stack()
    kept: list[torch.Tensor] = []

    def keep(layer: nn.Linear, *args: object) -> None:
        kept[:] = [layer.weight.detach() if keeps == "weight" else layer.weight.data[1:3]]

    model[1].register_forward_pre_hook(keep)  # after the gather
    with debug_mode():
        output = model(batch(0))
        (given_back,) = kept
        with pytest.raises(RuntimeError, match="computed from full parameters after their memory"):
            (output * given_back[:1]).sum().backward()
        assert given_back.isnan().all()
        model.reset_iter_state()
        del output, given_back
        kept.clear()


def frame_bytes_of_all() -> int:
    """Bytes that frames take while no rank computes."""
    dist.barrier()
    found = shared().frame_bytes
    dist.barrier()
    return found


@distributed(2)
def test_large_frames_are_given_back_after_a_step_and_after_an_evaluation() -> None:
    with frames(2, kept=0):
        model = stack()
        plainly(model, 0)
        before = frame_bytes_of_all()
        with torch.no_grad():
            model(batch(1))
        assert frame_bytes_of_all() == before
        with unsharded(model):
            pass
        assert frame_bytes_of_all() == before
    with frames(2):
        plainly(model, 2)
        assert frame_bytes_of_all() >= before + 2 * LAYER


def shared() -> SharedMemoryStatistics:
    gc.collect()
    group = world()
    return shared_memory_statistics(group)


@distributed(2)
def test_full_parameters_take_the_memory_of_a_few_groups() -> None:
    before = shared()
    # A frame that one rank still has from an earlier test may serve all of them.
    frame_bytes = everyone(before.frame_bytes)
    model = stack()
    for step in range(3):
        plainly(model, step)
    after = shared()
    assert after.buffer_bytes - before.buffer_bytes == LAYERS * LAYER
    assert after.frame_bytes - max(frame_bytes) <= 2 * LAYER
    assert after.moved_out == before.moved_out
    del model
    assert shared().frame_bytes == before.frame_bytes


@distributed(2)
def test_groups_that_are_held_at_once_have_memory_each() -> None:
    before = shared()
    model = stack(reshard_after_forward=False)
    for step in range(3):
        plainly(model, step)
    after = shared()
    assert after.frame_bytes >= LAYERS * LAYER
    assert after.moved_out == before.moved_out


@distributed(2)
def test_what_has_no_memory_of_its_own_is_moved_and_counted() -> None:
    before = shared()
    model = stack()
    plainly(model, 0)  # where groups follow one another
    model.set_reshard_after_forward(False)
    plainly(model, 1)  # where all are held at once
    assert shared().moved_out > before.moved_out
