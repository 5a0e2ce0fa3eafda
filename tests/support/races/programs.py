"""Programs whose races are watched: a small model, trained under one policy each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from fullshard.comm import (
    CommStreams,
    DefaultAllGather,
    DefaultReduceScatter,
    Layout,
    ReduceConfig,
    TensorSpec,
    foreach_reduce,
    reduction_scaling,
)
from fullshard.comm.collectives import lists
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.streams import canonical_device
from fullshard.optim import clip_grad_norm_
from fullshard.policies import CPUOffloadPolicy, DepthPrefetch, MixedPrecisionPolicy, NoPrefetch
from fullshard.samehost import AllToAllTransport
from fullshard.sharding import (
    FSDPModule,
    ShardingPlacements,
    fully_shard,
    unsharded,
)
from fullshard.wire import Quantised, WirePolicy
from support.gather_hooks import BFloat16Travel

WIDTH, ROWS = 16, 4
Program = Callable[[DeviceMesh], object]


class Block(nn.Module):
    """A layer with a bias, a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.checkpointed = ""

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpointed:
            return self._run(x)
        return checkpoint(self._run, x, use_reentrant=self.checkpointed == "reentrant")


class Model(nn.Module):
    """An embedding, blocks, and a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool = False, checkpointed: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.around = checkpointed
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if self.around and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.around == "reentrant")
            else:
                x = block(x)
        return self.head(x)


class StoredOnHost(CPUOffloadPolicy):
    """Gradients are brought home one after another, when each is reduced."""

    lands_early = True


def loss_of(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(0, 11, (ROWS, 5))
    out = model(ids)
    # Without a wait of the host, which would order the backward after the forward.
    targets = ids.flatten().to(out.device, non_blocking=True)
    return cross_entropy(out.flatten(0, 1), targets)


def build(
    mesh: DeviceMesh, *, tied: bool = False, checkpointed: str = "", **options: Any
) -> FSDPModule:
    torch.manual_seed(0)
    model = Model(tied=tied, checkpointed=checkpointed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    sharded = fully_shard(model, mesh=mesh, **options)
    return sharded


def train(
    mesh: DeviceMesh,
    *,
    steps: int = 2,
    evaluate: bool = True,
    micro_batches: int = 1,
    prepare: Callable[[Any], object] = lambda model: None,
    before_step: Callable[[Any], object] = lambda model: None,
    after_step: Callable[[Any], object] = lambda model: None,
    backward: Callable[[Any, bool], object] = lambda model, last: loss_of(model).backward(),
    at_end: Callable[[Any], object] = lambda model: None,
    **options: Any,
) -> list[float]:
    model: Any = build(mesh, **options)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[torch.Tensor] = []
    for _ in range(steps):
        for number in range(micro_batches):
            backward(model, number == micro_batches - 1)
        before_step(model)
        optimizer.step()
        after_step(model)
        optimizer.zero_grad()
        with torch.no_grad():
            losses += [loss_of(model)] if evaluate else []
    at_end(model)
    return [loss.item() for loss in losses]  # read late: a host that waits would hide races


# -- what differs ---------------------------------------------------------------------------------


def _explicit_prefetch(model: Any) -> None:
    blocks = list(model.blocks)
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


def _without_sync(model: Any, last: bool, **also: bool) -> None:
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    loss_of(model).backward()


def _without_all_reduce(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)
    loss_of(model).backward()


def _partial_not_last(model: Any, last: bool) -> None:
    """Partial sums, whose all-reduce nobody waits for, and no forward between the backwards."""
    model.set_is_last_backward(last)
    losses = [loss_of(model) for _ in range(3)]
    for reduces, loss in enumerate(losses):
        model.set_requires_all_reduce(reduces == 2)
        loss.backward()


def _partial_by_hand(model: Any, last: bool) -> None:
    """Partial sums that the queue holds no longer, and an all-reduce that no backward waits for."""
    model.set_requires_all_reduce(False)
    loss_of(model).backward()
    model.set_requires_all_reduce(True)
    model.set_manual_backward_finalization(True)
    for loss in [loss_of(model) for _ in range(2)]:
        loss.backward()
    model.finalize_backward()
    model.set_manual_backward_finalization(False)


def _not_last(model: Any, last: bool) -> None:
    model.set_is_last_backward(last)
    loss_of(model).backward()


def _finalized(model: Any, last: bool) -> None:
    """Backwards that do not finish by themselves, and one that ends them."""
    model.set_manual_backward_finalization(True)
    loss_of(model).backward()
    if last:
        handle = model.finalize_backward(async_op=True)
        handle.wait()


def _hooked(model: Any) -> None:
    for block in model.blocks:
        block.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5))


def _own_comm(model: Any) -> None:
    for module in (model, *model.blocks):
        module.set_custom_all_gather(OwnGather())
        module.set_custom_reduce_scatter(OwnReduce())


class OwnGather(DefaultAllGather):
    """A gather as a user writes one: asynchronous whenever it may be."""

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        return compat.gather_into(output_tensor, input_tensor, group, async_op)


class OwnReduce(DefaultReduceScatter):
    """A reduction that always returns a handle."""

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return compat.reduce_scatter_into(output_tensor, input_tensor, group, op, True)


class OwnAllToAll(DefaultReduceScatter):
    """A reduction by all-to-all, in flight, which adds what came when it is waited for."""

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return AllToAllTransport().reduce_scatter(output_tensor, input_tensor, group, op, True)


def _all_to_all(model: Any) -> None:
    for module in (model, *model.blocks):
        module.set_custom_reduce_scatter(OwnAllToAll())


def _clip(model: Any) -> None:
    clip_grad_norm_(model, 0.1)


def _travelling(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(BFloat16Travel(module.weight.detach()))


def _hooks_program(mesh: DeviceMesh) -> list[float]:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        _travelling(block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses: list[torch.Tensor] = []
    for _ in range(2):
        losses.append(loss_of(model))
        losses[-1].backward()
        model.zero_grad()
    return [loss.item() for loss in losses]


def _raises_late(model: Any, last: bool) -> None:
    """A backward that fails after it has added to earlier gradients, which are read at once."""
    loss_of(model).backward()
    with _failing(model.blocks[0].up.register_full_backward_pre_hook) as failing:
        failing(loss_of(model).backward)
    model.reset_iter_state()


def _raises(model: Any, last: bool) -> None:
    """A backward that fails half-way, then the recovery, then a good one."""
    up = model.blocks[0].up
    with _failing(up.register_full_backward_pre_hook) as failing:
        loss = loss_of(model)
        failing(loss.backward)
    del loss
    model.reset_iter_state()
    with _failing(model.blocks[1].up.register_forward_pre_hook) as failing:
        failing(lambda: loss_of(model))
    model.reset_iter_state()
    loss_of(model).backward()


@contextlib.contextmanager
def _failing(register: Callable[[Any], Any]) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Inside the ``with`` block a hook raises: calls what must then fail."""

    def fail(*_: object) -> None:
        raise ArithmeticError("as planned")

    def failing(call: Callable[[], object]) -> None:
        with pytest.raises(ArithmeticError, match="as planned"):
            call()

    handle = register(fail)
    yield failing
    handle.remove()


def _by_hand(model: Any, last: bool) -> None:
    with unsharded(model, writeback=True):
        model.head.weight.data.mul_(0.5)
    model.unshard(async_op=True)  # what was just written; the forward takes it as it is
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    loss_of(model).backward()
    model.unshard()
    model.reshard()


def _full_first(model: Any, last: bool) -> None:
    with unsharded(model):
        factor = model.head.weight.detach().abs().mean()
    (loss_of(model) * factor).backward()


def _post_optim_event(model: Any) -> None:
    event = torch.Event()
    event.record()
    model.set_post_optim_event(event)


def _two_forwards(model: Any, last: bool) -> None:
    (loss_of(model) + loss_of(model)).backward()


def _retained(model: Any, last: bool) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def _dropped(model: Any, last: bool) -> None:
    loss_of(model)  # its graph dies
    loss_of(model).backward()


# -- without a model -------------------------------------------------------------------------------


def gather_and_reduce_lists(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Lists of tensors that are changed before they travel, and after."""
    group = mesh.get_group("shard")
    specs = [TensorSpec(shape=(group.size() * 2, 3), dtype=torch.float32)]
    shards = [torch.ones(2, 3, device=mesh.device_type)]
    for _ in range(2):
        shards[0].mul_(2)
        full = lists.all_gather_tensors(shards, specs, group)
        shards = lists.reduce_scatter_tensors([full[0].mul(2)], specs, group)
    return shards


def reduce_in_flight(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Reductions that nobody waits for before the next ones are packed."""
    group, device = mesh.get_group("shard"), torch.device(mesh.device_type)
    specs = [TensorSpec(shape=(group.size() * 2, 3), dtype=torch.float32)]
    config = ReduceConfig(
        comm=DefaultReduceScatter(),
        process_group=group,
        streams=CommStreams(device),
        device=canonical_device(device),
        scaling=reduction_scaling(group.size(), torch.float32, averages=False),
    )
    layout, flights = Layout(specs, group.size()), []
    for number in range(4):
        gradient = torch.full(specs[0].shape, float(number), device=device)
        flights.append(foreach_reduce([gradient], layout, config))
    return [flight.wait().shards[0] for flight in flights]


# -- what they are called --------------------------------------------------------------------------

_HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
_NARROW = WirePolicy(gathers=torch.bfloat16, reductions=torch.bfloat16)
_IN_BLOCKS = WirePolicy(gathers=Quantised(torch.int8, 16), reductions=Quantised(torch.int8, 16))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefetch-nothing": {"prefetch_policy": NoPrefetch()},
    "prefetch-far": {"prefetch_policy": DepthPrefetch(forward=2, backward=2)},
    "prefetch-by-hand": {"prepare": _explicit_prefetch},
    "kept": {"reshard_after_forward": False},
    "post-forward-mesh": {"reshard_after_forward": 2},
    "no-sync": {"micro_batches": 3, "backward": _without_sync},
    "no-sync-mixed": {"micro_batches": 3, "backward": _without_sync, "mp_policy": _HALF},
    "finalized": {"micro_batches": 2, "backward": _finalized},
    "not-last": {"micro_batches": 3, "backward": _not_last},
    "partial-not-last": {
        "micro_batches": 2,
        "steps": 1,
        "backward": _partial_not_last,
        "prepare": lambda model: model.set_reduce_scatter_max_input_buffers(16),
    },
    "partial-by-hand": {"steps": 1, "backward": _partial_by_hand},
    "accumulated": {"micro_batches": 3},
    "recovered-accumulated": {"backward": _raises_late},
    "mixed": {"mp_policy": _HALF},
    "narrow": {"wire_policy": _NARROW},
    "in-blocks": {"wire_policy": _IN_BLOCKS},
    "narrow-no-sync": {"micro_batches": 3, "backward": _without_sync, "wire_policy": _NARROW},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "offloaded-mixed": {"offload_policy": CPUOffloadPolicy(), "mp_policy": _HALF},
    "offloaded-accumulated": {"offload_policy": CPUOffloadPolicy(), "micro_batches": 3},
    "offloaded-stored": {"offload_policy": StoredOnHost(), "micro_batches": 3},
    "offloaded-state": {"offload_policy": CPUOffloadPolicy(parameters=False)},
    "tied": {"tied": True},
    "checkpointed": {"checkpointed": "non-reentrant"},
    "checkpointed-reentrant": {"checkpointed": "reentrant"},
    "recovered": {"backward": _raises},
    "recovered-pageable": {
        "backward": _raises,
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    },
    "recovered-ahead": {
        "backward": _raises,
        "prefetch_policy": DepthPrefetch(forward=2, backward=2),
    },
    "all-to-all": {"prepare": _all_to_all},
    "own-collectives": {"prepare": _own_comm},
    "clipped": {"before_step": _clip},
    "all-reduce-hook": {"prepare": _hooked},
    "by-hand": {"backward": _by_hand},
    "full-after-step": {"backward": _full_first, "evaluate": False},
    "no-all-reduce": {"micro_batches": 3, "backward": _without_all_reduce},
    "post-optim-event": {"after_step": _post_optim_event},
    "two-forwards": {"backward": _two_forwards},
    "retained": {"backward": _retained},
    "graph-dropped": {"backward": _dropped, "reshard_after_forward": False},
    "one-input": {"prepare": lambda model: model.set_reduce_scatter_max_input_buffers(1)},
    "three-inputs": {"prepare": lambda model: model.set_reduce_scatter_max_input_buffers(3)},
}
_INSIDE = ShardingPlacements(compute="shard", gradients="shard")
_FULL = ShardingPlacements(compute=())
_ON_TWO_AXES: dict[str, dict[str, Any]] = {
    "zero-1": {"placements": ShardingPlacements(compute=(), gradients=())},
    "zero-2": {"placements": _FULL},
    "zero-2-offloaded": {"placements": _FULL, "offload_policy": CPUOffloadPolicy()},
    "zero-2-recovered": {"placements": _FULL, "backward": _raises},
    "two-levels": {"placements": _INSIDE},
    "two-levels-full": {"placements": ShardingPlacements(compute=(), gradients="shard")},
    "two-levels-each": {"placements": ShardingPlacements(compute="shard")},
    "two-levels-mixed": {"placements": _INSIDE, "mp_policy": _HALF},
    "two-levels-offloaded": {"placements": _INSIDE, "offload_policy": CPUOffloadPolicy()},
    "two-levels-far": {
        "placements": _INSIDE,
        "prefetch_policy": DepthPrefetch(forward=2, backward=2),
    },
    "two-levels-recovered": {"placements": _INSIDE, "backward": _raises},
}
PLACED = {
    name: {"micro_batches": 3, "backward": _not_last, **options}
    for name, options in _ON_TWO_AXES.items()
}
PROGRAMS: dict[str, Program] = {name: partial(train, **o) for name, o in (OPTIONS | PLACED).items()}
PROGRAMS["lists"] = gather_and_reduce_lists
PROGRAMS["reductions"] = reduce_in_flight
PROGRAMS["gather-hooks"] = _hooks_program
