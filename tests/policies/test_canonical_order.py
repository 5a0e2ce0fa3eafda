"""The canonical order: ranks skip whole groups, and the gradients are those of the unsharded model.

Each rank tells from its own batch what to run. The reference runs what every rank runs, one after
the other, in one process, and takes the mean of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import CanonicalOrder
from fullshard.policies.schedules.canonical_order import Event, Step, backward_steps, forward_steps
from fullshard.sharding import FSDPModule, ShardingPlacements, fully_shard
from fullshard.sharding.base.states import ShardedState
from fullshard.sharding.hooks.lookup import the_state
from support.apart import private_memory
from support.failing import failing
from support.modules import Assembled
from support.ranks import cpu_mesh, distributed
from support.surface.ranks import everyone

WIDTH = 6
Plan = str
"""What a batch needs: "v" the vision tower, "t" the text blocks, "a" the auxiliary loss."""

COLLECTIVES = (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER, EventKind.ALL_REDUCE)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    """A vision tower, text blocks and an auxiliary head, of which a batch may need none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.vision = nn.ModuleList(Block() for _ in range(4))
        self.text = nn.ModuleList(Block() for _ in range(2))
        self.extra = Block()
        self.head = nn.Linear(WIDTH, 2)
        self.call: Callable[..., torch.Tensor] = _call

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        x = self.embed(x)
        for block in self.vision if "v" in plan else ():
            x = self.call(block, x)
        for block in self.text if "t" in plan else ():
            x = self.call(block, x)
        unused = self.extra(x)  # runs, and is in the loss of some ranks only
        out: torch.Tensor = self.head(x + unused if "a" in plan else x)
        return out


def _call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = block(x)
    return out


def shard(**options: object) -> Net:
    net = Net().double()
    for block in [*net.vision, *net.text, net.extra]:
        fully_shard(block, **options)  # type: ignore[call-overload]  # any of its options
    fully_shard(net, **options)  # type: ignore[call-overload]  # any of its options
    assert isinstance(net, FSDPModule)
    net.set_schedule(CanonicalOrder())
    return net


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(net: nn.Module, rank: int, step: int, plan: Plan) -> torch.Tensor:
    out: torch.Tensor = net(batch(rank, step), plan)
    return out.square().sum()


def add_up(plain: Net, plans: list[Plan], step: int = 0) -> Net:
    """The unsharded model, which gets the mean of the gradients of all ranks."""
    losses = [loss_of(plain, rank, step, plan) for rank, plan in enumerate(plans)]
    (torch.stack(losses).sum() / len(plans)).backward()
    return plain


def reference(plans: list[Plan]) -> Net:
    return add_up(Net().double(), plans)


def assert_gradients(net: nn.Module, wanted: nn.Module) -> None:
    for (name, param), plain in zip(net.named_parameters(), wanted.parameters(), strict=True):
        assert (param.grad is None) == (plain.grad is None), f"{name}: {param.grad}, {plain.grad}"
        if param.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), plain.grad, msg=name)  # type: ignore[attr-defined]  # a DTensor


@contextmanager
def assert_same_collectives() -> Iterator[EventLog]:
    """Fails unless all ranks issue the same collectives in the same order."""
    log = EventLog()
    with observe(log):
        yield log
    mine = [(str(e.kind), e.name, e.nbytes) for e in log.events if e.kind in COLLECTIVES]
    assert mine and all(each == mine for each in everyone(mine))


PLANS = {
    "all ranks run all": ["vta", "vta", "vta", "vta"],
    "one rank has images": ["vt", "t", "t", "t"],
    "one rank has none": ["t", "vt", "vt", "vt"],
    "one rank skips all": ["", "vta", "vt", "vta"],
    "nobody has images": ["t", "ta", "t", ""],
    "an output is not used by some": ["vta", "vt", "vta", "vt"],
}


@pytest.mark.parametrize("name", PLANS)
@distributed(2, 4, matrix=[4])
def test_gradients_are_those_of_the_unsharded_model(name: str, world_size: int) -> None:
    plans, rank = PLANS[name][:world_size], dist.get_rank()
    net = shard()
    with assert_same_collectives():
        loss_of(net, rank, 0, plans[rank]).backward()
    assert_gradients(net, reference(plans))


@distributed(4)
def test_on_a_hybrid_mesh_too() -> None:
    plans, rank = ["vt", "t", "", "vta"], dist.get_rank()
    net = shard(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    loss_of(net, rank, 0, plans[rank]).backward()
    assert_gradients(net, reference(plans))


# -- programs -------------------------------------------------------------------------------------

STEPS = (["vt", "t"], ["", "va"], ["ta", "t"])


def losses_of(net: Any) -> list[Callable[[], torch.Tensor]]:
    """For each step, a function that runs its forward."""
    rank = dist.get_rank()
    return [partial(loss_of, net, rank, step, plans[rank]) for step, plans in enumerate(STEPS)]


def checkpointed(net: Any, *, reentrant: bool) -> None:
    net.call = partial(checkpoint, use_reentrant=reentrant)
    for loss in losses_of(net):
        loss().backward()


def checkpointed_whole(net: Any) -> None:
    """Backward begins with the forward of the root, before a hook on any output could tell."""
    net.set_schedule(CanonicalOrder(slack=8))  # a checkpoint that holds all sharded modules
    rank = dist.get_rank()
    for step, plans in enumerate(STEPS):
        x = batch(rank, step).requires_grad_()
        out: torch.Tensor = checkpoint(net, x, plans[rank], use_reentrant=True)
        out.square().sum().backward()


def accumulated(net: Any) -> None:
    for step, loss in enumerate(losses_of(net)):
        net.set_requires_gradient_sync(step != 1)
        loss().backward()


def forwards_first(net: Any) -> None:
    for loss in reversed([loss() for loss in losses_of(net)]):
        loss.backward()


def evaluated_between(net: Any) -> None:
    for loss in losses_of(net):
        with torch.no_grad():
            found = loss()
        torch.testing.assert_close(found, loss().detach())
        loss().backward()


def prefetched(net: Any) -> None:
    blocks = [*net.vision, *net.text]
    for before, after in zip(blocks, blocks[2:], strict=False):
        before.set_modules_to_forward_prefetch([after])  # skips one
        after.set_modules_to_backward_prefetch([before])
    for loss in losses_of(net):
        loss().backward()


def gathered_by_hand(net: Any) -> None:
    """It ends on all ranks, whichever ran it."""
    for loss in losses_of(net):
        for block in net.vision:
            block.unshard()
        found = loss()
        for block in net.vision:
            block.unshard(async_op=True)
        found.backward()


PROGRAMS: dict[str, Callable[[Any], None]] = {
    "reentrant checkpoints": partial(checkpointed, reentrant=True),
    "checkpoints": partial(checkpointed, reentrant=False),
    "a reentrant checkpoint of the root": checkpointed_whole,
    "accumulated": accumulated,
    "forwards first": forwards_first,
    "evaluated between": evaluated_between,
    "prefetched": prefetched,
    "gathered by hand": gathered_by_hand,
}


@pytest.mark.parametrize("program", PROGRAMS)
@distributed(2)
def test_a_program_has_the_gradients_of_the_unsharded_model(program: str) -> None:
    net, plain = shard(), Net().double()
    with assert_same_collectives():
        PROGRAMS[program](net)
    for step, plans in enumerate(STEPS):
        add_up(plain, plans, step)
    assert_gradients(net, plain)


class Region(nn.Module):
    """Three sharded blocks in one checkpointed region, and a last layer that some ranks skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last, self.head = Block(), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        x = checkpoint(self.region, x, plan, use_reentrant=False)
        out: torch.Tensor = self.head(x)
        return out

    def region(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        for block in (*self.blocks, *[self.last] * ("t" in plan)):
            x = block(x)
        return x


@distributed(2)
def test_a_region_is_recomputed_in_one_order_where_some_ranks_skip_its_end() -> None:
    """Ranks begin its recomputation at different places: at its last layer, or in a hook."""
    net, plain, plans = Region().double(), Region().double(), ["t", ""]
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    assert isinstance(net, FSDPModule)
    net.set_schedule(CanonicalOrder(slack=3))  # sharded modules in the region
    with assert_same_collectives():
        loss_of(net, dist.get_rank(), 0, plans[dist.get_rank()]).backward()
    for rank, plan in enumerate(plans):
        (loss_of(plain, rank, 0, plan) / len(plans)).backward()
    assert_gradients(net, plain)


@distributed(2)
def test_what_is_passed_over_is_not_kept() -> None:
    net = shard()
    groups = [the_state(block).own_groups[0] for block in net.vision]
    seen: list[int] = []

    def count(module: nn.Module, *_: object) -> None:
        seen.append(sum(group.state is not ShardedState.SHARDED for group in groups))

    net.text[0].register_forward_pre_hook(count)
    loss_of(net, dist.get_rank(), 0, ["vt", "t"][dist.get_rank()]).backward()
    assert max(seen) <= 2, "of four that this rank did not run"


class Shared(nn.Module):
    """Weights tied across groups, and a list of modules as one group around the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(WIDTH, WIDTH)
        blocks = [Block() for _ in range(3)]
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = blocks[0].inner.weight

    def forward(self, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks if "v" in plan else ():
            x = block(x)
        out: torch.Tensor = self.tied(self.last(x))
        return out


@distributed(2)
def test_tied_weights_and_lists_of_modules() -> None:
    plans, rank = ["v", ""], dist.get_rank()
    net, plain = Shared().double(), Shared().double()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net.tied)
    fully_shard([net.first, net.last])
    fully_shard(net)
    assert isinstance(net, FSDPModule)
    net.set_schedule(CanonicalOrder())
    for _ in range(2):
        with assert_same_collectives():
            loss_of(net, rank, 0, plans[rank]).backward()
        for each, plan in enumerate(plans):
            (loss_of(plain, each, 0, plan) / 2).backward()
    assert_gradients(net, plain)


def twice() -> Any:
    block, after = Block(), Block()
    return Assembled(lambda m, x: m.block(m.after(m.block(x))), block=block, after=after).double()


@distributed(2)
def test_a_module_that_runs_twice_needs_to_stay_unsharded_and_the_error_says_so() -> None:
    torch.manual_seed(0)
    net = twice()
    plain = twice()
    plain.load_state_dict(net.state_dict())
    fully_shard(net.block)
    fully_shard(net.after)
    fully_shard(net)
    assert isinstance(net, FSDPModule) and isinstance(net.block, FSDPModule)
    net.set_schedule(CanonicalOrder())
    with pytest.raises(RuntimeError, match=r"turn of 'block'.*set_reshard_after_forward\(False\)"):
        net(batch(0, 0))
    net.reset_iter_state()
    net.block.set_reshard_after_forward(False)
    for _ in range(2):
        with assert_same_collectives():
            net(batch(0, 0)).sum().backward()
        plain(batch(0, 0)).sum().backward()
    assert_gradients(net, plain)


@distributed(2)
def test_turned_off_it_is_as_if_it_had_never_been_on() -> None:
    rank, net, plain = dist.get_rank(), shard(), shard()
    assert isinstance(net, FSDPModule) and isinstance(plain, FSDPModule)
    loss_of(net, rank, 0, "vta").backward()
    net.zero_grad()
    net.set_schedule(None)
    plain.set_schedule(None)
    orders = []
    for each in (net, plain):
        log = EventLog()
        with observe(log):
            loss_of(each, rank, 0, "vta").backward()
        orders.append([(e.kind, e.name) for e in log.events])
    assert orders[0] == orders[1]
    assert_gradients(net, reference(["vta", "vta"]))


@distributed(2)
def test_it_is_refused_where_it_cannot_be() -> None:
    net = shard()
    assert isinstance(net, FSDPModule)
    with pytest.raises(RuntimeError, match="not the root"):
        net.extra.set_schedule(CanonicalOrder())  # type: ignore[operator]  # a sharded module
    with pytest.raises(ValueError, match="slack"):
        net.set_schedule(CanonicalOrder(slack=0))
    net.set_schedule(None)

    def turn_on(gradient: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="in the middle of a forward or backward"):
            net.set_schedule(CanonicalOrder())

    output = net(batch(0, 0), "vta")
    output.register_hook(turn_on)
    output.sum().backward()


@distributed(2)
def test_two_roots_cannot_share_one() -> None:
    order, roots = CanonicalOrder(), [fully_shard(Net()) for _ in range(2)]
    roots[0].set_schedule(order)
    with pytest.raises(ValueError, match="another root has this CanonicalOrder; make one for each"):
        roots[1].set_schedule(order)
    assert not isinstance(the_state(roots[1]).context.schedule, CanonicalOrder)
    roots[0].set_schedule(order)


@distributed(4)
def test_a_smaller_world_is_refused() -> None:
    net = Net()
    fully_shard(net.extra, reshard_after_forward=2)
    fully_shard(net)
    assert isinstance(net, FSDPModule)
    with pytest.raises(ValueError, match=r"extra.*post-forward mesh"):
        net.set_schedule(CanonicalOrder())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward"])
@distributed(2)
def test_after_a_pass_that_raised_ranks_that_skipped_different_groups_train_on(
    where: str, shared: bool
) -> None:
    """They came to different places of the order."""
    plans, rank = ["vta", "ta"], dist.get_rank()
    with nullcontext() if shared else private_memory():
        net, plain = shard(), Net().double()
        assert isinstance(net, FSDPModule)
        for step in range(2):
            with failing(net.text[0], backward=where == "backward"):
                loss_of(net, rank, 7, plans[rank]).backward()
            net.reset_iter_state()
            for module in (net, plain):
                module.zero_grad()
            loss_of(net, rank, step, plans[rank]).backward()
            add_up(plain, plans, step)
    assert_gradients(net, plain)


@distributed(2)
def test_a_forward_that_raises_leaves_the_reductions_of_backwards_before_it() -> None:
    """They are under way, as no backward waited for them."""
    plans, rank = ["vta", "ta"], dist.get_rank()
    net, plain = shard(), Net().double()
    assert isinstance(net, FSDPModule)
    net.set_is_last_backward(False)
    loss_of(net, rank, 0, plans[rank]).backward()
    with failing(net.text[0]):
        loss_of(net, rank, 7, plans[rank])
    net.set_is_last_backward(True)
    loss_of(net, rank, 1, plans[rank]).backward()
    for step in range(2):
        add_up(plain, plans, step)
    assert_gradients(net, plain)


@pytest.mark.parametrize("before", [False, True])
@distributed(2)
def test_after_a_backward_that_raised_gradients_are_accumulated_again(before: bool) -> None:
    """The setting may change before the forward or after it."""
    plans, rank = ["vta", "ta"], dist.get_rank()
    net, plain = shard(), Net().double()
    assert isinstance(net, FSDPModule)
    net.set_requires_gradient_sync(False)
    loss_of(net, rank, 0, plans[rank]).backward()
    net.set_requires_gradient_sync(True)
    part = [net.vision[0], net.text[1]][rank]  # rank 0 reduces more groups
    with failing(part, backward=True):
        loss_of(net, rank, 7, plans[rank]).backward()
    with pytest.warns(RuntimeWarning, match="are dropped"):
        net.reset_iter_state()
    for step in (1, 2):
        if before:
            net.set_requires_gradient_sync(step == 2)
        loss = loss_of(net, rank, step, plans[rank])
        net.set_requires_gradient_sync(step == 2)
        loss.backward()
    for step in range(1, 3):
        add_up(plain, plans, step)
    assert_gradients(net, plain)


@pytest.mark.parametrize("placements", [None, ShardingPlacements(compute="inner")])
@distributed(4)
def test_on_two_axes_ranks_that_raised_at_different_places_train_on(
    placements: ShardingPlacements | None,
) -> None:
    """Each has launched as many second reductions, and gathered as many compute shards."""
    rank, plans = dist.get_rank(), ["vta"] * 4
    options = {} if placements is None else {"placements": placements}
    net, plain = shard(mesh=cpu_mesh((2, 2), ("outer", "inner")), **options), Net().double()
    part = [net.vision[0], net.text[1], net.head, net.embed][rank]
    with failing(part, backward=True):
        loss_of(net, rank, 7, plans[rank]).backward()
    net.reset_iter_state()  # type: ignore[operator]  # a sharded module
    loss_of(net, rank, 0, plans[rank]).backward()
    assert_gradients(net, add_up(plain, plans))


@pytest.mark.parametrize("placements", [None, ShardingPlacements(compute="inner")])
@pytest.mark.filterwarnings("ignore:gradients of earlier backwards")
@distributed(4)
def test_what_was_frozen_between_micro_batches_is_reduced_by_all_ranks_of_one_that_raised(
    placements: ShardingPlacements | None,
) -> None:
    """Some ranks have reduced a group as the error comes, others do so in the reset."""
    rank, plans = dist.get_rank(), ["vta"] * 4
    options = {} if placements is None else {"placements": placements}
    net, plain = shard(mesh=cpu_mesh((2, 2), ("outer", "inner")), **options), Net().double()
    assert isinstance(net, FSDPModule)
    net.set_requires_gradient_sync(False)
    loss_of(net, rank, 0, plans[rank]).backward()
    net.set_requires_gradient_sync(True)
    for model in (net, plain):
        for name, param in model.named_parameters():
            param.requires_grad_(not name.endswith("bias"))
    part = [net.vision[0], net.text[1], net.head, net.embed][rank]
    with failing(part, backward=True):
        loss_of(net, rank, 7, plans[rank]).backward()
    net.reset_iter_state()
    net.zero_grad()
    loss_of(net, rank, 0, plans[rank]).backward()
    assert_gradients(net, add_up(plain, plans))


@distributed(2)
def test_full_parameters_that_are_kept_within_a_step_are_refused() -> None:
    net = Net()
    fully_shard(net.extra, placements=ShardingPlacements.zero(1))
    fully_shard(net, placements=ShardingPlacements.zero(3))
    assert isinstance(net, FSDPModule)
    with pytest.raises(ValueError, match=r"extra keep full.*without compute=\(\)"):
        net.set_schedule(CanonicalOrder())
    net.set_placements(ShardingPlacements(gradients=()))
    net.set_schedule(CanonicalOrder())
    with pytest.raises(ValueError, match=r"CanonicalOrder.*compute=\(\).*set_schedule\(None\)"):
        net.set_placements(ShardingPlacements.zero(2))


class _Module:
    """Stands for the state of a module, with the groups that it uses."""

    def __init__(self, *groups: object) -> None:
        self.groups = groups


@st.composite
def trees(draw: st.DrawFn) -> list[Event]:
    """The events of a tree of modules, which use one group each, and some a second one."""
    groups = [object() for _ in range(draw(st.integers(1, 8)))]
    events: list[Event] = []
    stack: list[Any] = []
    for index in range(len(groups)):
        while stack and not draw(st.booleans()):
            events.append(Event(stack.pop(), ends=True))
        tied = groups[draw(st.integers(0, index))]
        state: Any = _Module(*dict.fromkeys([groups[index], tied]))
        stack.append(state)
        events.append(Event(state))
    return [*events, *(Event(state, ends=True) for state in reversed(stack))]


@given(events=trees(), slack=st.integers(1, 10))
def test_the_order_holds_each_group_once_and_lets_as_many_gathers_pass_as_slack_says(
    events: list[Event], slack: int
) -> None:
    groups = list(dict.fromkeys(g for event in events for g in event.state.groups))
    assert forward_steps(events) == [Step(group) for group in groups]
    turns = backward_steps(events, slack)
    assert len(turns) == len(set(turns)) == 2 * len(groups)
    at = {turn: index for index, turn in enumerate(turns)}
    gathers = [turn for turn in turns if not turn.reduces]
    for group in groups:
        assert at[Step(group)] < at[Step(group, reduces=True)], "gathered before it is reduced"
    # By the definition: at the end of a group's first module, so many gathers have been issued.
    reversed_events = list(reversed(events))
    for group in groups:
        begin = max(i for i, e in enumerate(reversed_events) if group in e.state.groups)
        ended = {g for e in reversed_events[:begin] if e.ends for g in e.state.groups}
        before = sum(not turn.reduces for turn in turns[: at[Step(group, reduces=True)]])
        assert before == min(len(ended) + slack, len(gathers))
