"""Small groups that share a launch: the same bits and the same leases, fewer collectives."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fullshard.comm import (
    DefaultAllGather,
    DefaultReduceScatter,
    Event,
    EventKind,
    EventLog,
    observe,
)
from fullshard.insight import debug_mode
from fullshard.policies import (
    CanonicalOrder,
    CoalescedSchedule,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
)
from fullshard.samehost import AllToAllTransport, peers, same_host_transport
from fullshard.sharding import Schedule, fully_shard
from fullshard.sharding.hooks.lookup import the_state
from support.apart import apart, private_memory
from support.failing import failing
from support.modules import Assembled, Residual
from support.products import few
from support.ranks import distributed
from support.surface.ranks import everyone

WIDTH = 6


def make_layer() -> Residual:
    """Parameters of several sizes, uneven over two ranks, one of them a number."""
    return Residual(WIDTH, 2 * WIDTH + 1, bias=False, scale=torch.tensor(0.5))


def _run(
    model: Any, x: torch.Tensor, skipped: tuple[int, ...] = (), reentrant: bool | None = None
) -> torch.Tensor:
    """Layers of which a call may skip some, or checkpoint all."""
    for index, layer in enumerate(model.layers):
        if index not in skipped:
            x = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
    return x


def make(layers: int = 5, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Assembled(_run, layers=nn.ModuleList(make_layer() for _ in range(layers)))
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def pair(**options: Any) -> tuple[Any, Any]:
    """A model whose groups share launches, and one whose groups do not."""
    together, alone = make(**options), make(**options)
    alone.set_schedule(Schedule())
    return together, alone


def batch(step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, WIDTH, generator=generator).requires_grad_()


def groups_of(model: Any) -> list[Any]:
    return [group for layer in model.layers for group in the_state(layer).own_groups]


def schedule_of(model: Any) -> CoalescedSchedule:
    schedule = the_state(model).context.schedule
    assert isinstance(schedule, CoalescedSchedule)
    return schedule


def launches_in(run: Callable[[], Any], kind: EventKind = EventKind.ALL_GATHER) -> int:
    """Launches in a call: of gathers, if nothing else is said."""
    log = EventLog()
    with observe(log):
        run()
    return len(log.of(kind))


def step(model: Any, index: int = 0, **options: Any) -> None:
    model(batch(index), **options).square().sum().backward()


def same_bits(together: Any, alone: Any) -> None:
    for mine, theirs in zip(together.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


def all_sharded(model: Any) -> None:
    """Every group gave its memory back, and modules hold shards."""
    for group in groups_of(model):
        assert not group.leases.out
        assert all(param.unsharded.untyped_storage().nbytes() == 0 for param in group.params)
    assert all(isinstance(param, DTensor) for param in model.parameters())


@distributed(2)
def test_from_the_second_forward_on_small_groups_are_gathered_in_one_launch() -> None:
    with apart() as mesh:
        together, alone = pair(mesh=mesh)
        assert launches_in(lambda: step(together)) == 5 + 1
        for _ in range(2):
            assert launches_in(lambda: step(alone)) == 10
            assert launches_in(lambda: step(together)) == 2
        all_sharded(together)


@distributed(2)
def test_the_reductions_of_a_bucket_are_one_launch_and_give_the_same_bits() -> None:
    with apart() as mesh:
        together, alone = pair(mesh=mesh)
        for index in range(3):
            log = EventLog()
            step(alone, index)
            with observe(log):
                step(together, index)
            assert len(log.of(EventKind.REDUCE_SCATTER)) == 1
            assert len(log.of(EventKind.REDUCE)) == len(log.of(EventKind.REDUCE_DONE)) == 5
            same_bits(together, alone)


def _training(together: Any, alone: Any, **options: Any) -> None:
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (together, alone)]
    for index in range(4):
        for model, optimizer in zip((together, alone), optimizers, strict=True):
            step(model, index, **options)
            optimizer.step()
        same_bits(together, alone)
        for optimizer in optimizers:
            optimizer.zero_grad()


def _accumulating(together: Any, alone: Any) -> None:
    for index in range(4):
        for model in (together, alone):
            model.set_requires_gradient_sync(index % 2 == 1)
            step(model, index)
        same_bits(together, alone)


def _several_forwards(together: Any, alone: Any) -> None:
    for index in range(3):
        for model in (together, alone):
            losses = [model(batch(10 * index + each)).square().sum() for each in range(2)]
            losses[1].backward()
            losses[0].backward()
        same_bits(together, alone)


def _evaluating(together: Any, alone: Any) -> None:
    for index in range(3):
        for model in (together, alone):
            step(model, index)
            with torch.no_grad():
                seen = [model(batch(index)) for model in (together, alone)]
        assert torch.equal(seen[0], seen[1])
        same_bits(together, alone)


def _skipping(together: Any, alone: Any) -> None:
    for index, skipped in enumerate([(), (), (1, 4), (1, 4), (), (0,)]):
        for model in (together, alone):
            step(model, index, skipped=skipped)
        all_sharded(together)
        same_bits(together, alone)


def _unsharding(together: Any, alone: Any) -> None:
    for index in range(4):
        for model in (together, alone):
            model.layers[2].unshard()
            step(model, index)
            model.layers[2].reshard()
        same_bits(together, alone)


def _freezing(together: Any, alone: Any) -> None:
    for index in range(4):
        for model in (together, alone):
            model.layers[index].up.requires_grad_(index % 2 == 1)
            model.layers[3].requires_grad_(index != 2)
            step(model, index)
        same_bits(together, alone)


def _raising(together: Any, alone: Any) -> None:
    """A backward that raises has reduced groups that are alone, and no bucket."""
    for index in range(3):
        for model in (together, alone):
            for backward in (False, True):
                with failing(model.layers[2], backward=backward):
                    step(model, index)
                model.reset_iter_state()
                model.zero_grad()
            step(model, index)
        all_sharded(together)
        same_bits(together, alone)


def _keeping_a_graph(together: Any, alone: Any) -> None:
    """Rank 0 alone keeps graphs."""
    for model in (together, alone):
        kept = []
        for index in range(3):
            output = model(batch(index))
            if dist.get_rank() == 0:
                kept.append(output)
            del output
            step(model, index)
    same_bits(together, alone)


PROGRAMS: dict[str, Callable[[Any, Any], None]] = {
    "training": _training,
    "checkpointed": lambda *models: _training(*models, reentrant=False),
    "checkpointed, reentrant": lambda *models: _training(*models, reentrant=True),
    "accumulating": _accumulating,
    "several forwards": _several_forwards,
    "evaluating": _evaluating,
    "skipping": _skipping,
    "unsharding": _unsharding,
    "freezing": _freezing,
    "raising": _raising,
    "keeping a graph": _keeping_a_graph,
    "mixed precision": _training,
    "offloaded": _training,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize(
    "program",
    few(
        PROGRAMS,
        "training",
        "checkpointed, reentrant",
        "accumulating",
        "several forwards",
        "skipping",
        "raising",
        "keeping a graph",
        *OPTIONS,
    ),
)
@distributed(2)
def test_no_bit_differs_from_groups_that_are_alone(program: str) -> None:
    with apart() as mesh:
        together, alone = pair(mesh=mesh, **OPTIONS.get(program, {}))
        PROGRAMS[program](together, alone)
        assert launches_in(lambda: together(batch())) <= 5
        assert launches_in(lambda: together(batch())) == 1
        all_sharded(together)


@distributed(2)
def test_in_debug_mode_each_group_is_gathered_by_itself() -> None:
    with apart() as mesh:
        together, alone = pair(mesh=mesh)
        step(together)
        step(alone)
        with debug_mode():
            for _ in range(2):
                assert launches_in(lambda: step(together)) == 10
                step(alone)
        for _ in range(2):
            step(together)
            step(alone)
        assert launches_in(lambda: together(batch())) == 1
        same_bits(together, alone)


@distributed(2)
def test_a_bucket_holds_no_more_than_its_cap() -> None:
    with apart() as mesh:
        model = make(6, mesh=mesh)
        one = groups_of(model)[0].gathering.layout.buffer.slice_nbytes * 2
        model.set_schedule(CoalescedSchedule(gather_cap_mb=2.5 * one / 2**20))
        model(batch())
        assert launches_in(lambda: model(batch())) == 3
        model.set_schedule(CoalescedSchedule(gather_cap_mb=0))
        assert [launches_in(lambda: model(batch())) for _ in range(2)] == [6, 6]
        model.set_schedule(CoalescedSchedule(gather_cap_mb=1))
        assert [launches_in(lambda: model(batch())) for _ in range(2)] == [6, 1]


@distributed(2)
def test_reductions_wait_until_the_next_does_not_fit() -> None:
    with apart() as mesh:
        together, alone = pair(mesh=mesh)
        one = groups_of(together)[0].gathering.layout.buffer.slice_nbytes * 2
        for cap, launches in ((0, 5), (2.5 * one / 2**20, 3), (1, 1)):
            together.set_schedule(CoalescedSchedule(reduce_cap_mb=cap))
            step(alone)
            assert launches_in(lambda: step(together), EventKind.REDUCE_SCATTER) == launches
            same_bits(together, alone)


@pytest.mark.parametrize(("cap", "error"), [("1", TypeError), (-1, ValueError), (inf, ValueError)])
@pytest.mark.parametrize("name", ["gather_cap_mb", "reduce_cap_mb"])
def test_a_cap_is_a_finite_number(name: str, cap: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        CoalescedSchedule(**{name: cap})


@distributed(2)
def test_a_group_that_is_kept_for_backward_is_gathered_by_itself() -> None:
    with apart() as mesh:
        model = make(mesh=mesh)
        model.layers[2].set_reshard_after_forward(False)
        step(model)
        assert launches_in(lambda: model(batch())) == 3  # two before it, itself, two after
        step(model)


@distributed(2)
def test_large_groups_are_gathered_by_themselves() -> None:
    with apart() as mesh:
        model: Any = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3)))  # 160 KB each
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            assert launches_in(lambda: model(torch.ones(1, 200))) == 3


@distributed(2)
def test_ranks_that_share_memory_gather_each_group_by_itself() -> None:
    model = make()
    for _ in range(2):
        assert launches_in(lambda: step(model), EventKind.REDUCE_SCATTER) == 5
    assert not schedule_of(model).buckets


@pytest.mark.parametrize("default", [DefaultAllGather, DefaultReduceScatter])
@distributed(2)
def test_a_collective_of_the_users_own_is_called_once_for_each_group(default: Any) -> None:
    class Counting(default):  # type: ignore[misc]  # either
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            Counting.calls += 1
            return super().__call__(*args, **kwargs)

    gathers = default is DefaultAllGather
    with apart() as mesh:
        together, alone = pair(mesh=mesh)
        for _ in range(2):
            step(together)
            step(alone)
        for layer in together.layers:
            (layer.set_custom_all_gather if gathers else layer.set_custom_reduce_scatter)(
                Counting()
            )
        for _ in range(2):
            step(together)
            step(alone)
        assert Counting.calls == (20 if gathers else 10)
        same_bits(together, alone)


@distributed(2)
def test_a_parameter_that_one_rank_did_not_use_gets_its_gradient_and_one_that_none_did_none() -> (
    None
):
    def choosing() -> Any:
        torch.manual_seed(0)
        return Assembled(
            lambda m, x: x * m.both + (m.first if dist.get_rank() == 0 else 0),
            **{name: nn.Parameter(torch.randn(4)) for name in ("both", "first", "none")},
        )

    with apart() as mesh:
        layers = (fully_shard(choosing(), mesh=mesh) for _ in range(2))
        model: Any = fully_shard(nn.Sequential(*layers), mesh=mesh)
        model(torch.ones(4)).sum().backward()
    for layer in model:
        assert layer.both.grad is not None and layer.first.grad is not None
        assert layer.none.grad is None


@distributed(4)
def test_on_a_hybrid_mesh_gathers_join_and_reductions_do_not() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with patch.object(peers, "host_identity", lambda: f"host {dist.get_rank()}"):
        assert same_host_transport(mesh.get_group("shard")) == AllToAllTransport()
    together, alone = pair(mesh=mesh)
    _training(together, alone)
    assert launches_in(lambda: together(batch())) == 1
    assert launches_in(lambda: step(together), EventKind.REDUCE_SCATTER) == 5


def _experts(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Two layers of which each rank runs one, between layers that all ranks run."""
    for index in (0, 1, 2 + dist.get_rank(), 4, 5):
        x = m.layers[index](x)
    return x


@distributed(2)
def test_ranks_that_run_different_unsharded_groups_make_the_same_buckets() -> None:
    with apart() as mesh:
        torch.manual_seed(0)
        model = Assembled(_experts, layers=nn.ModuleList(make_layer() for _ in range(6)))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(3):
            for expert in (2, 3):
                model.layers[expert].unshard()
            with torch.no_grad():
                model(batch())
        buckets = schedule_of(model).buckets
        mine = [
            tuple(each.name for each in buckets[group].groups) if group in buckets else ()
            for group in groups_of(model)
        ]
        assert all(each == mine for each in everyone(mine))
        assert mine[0] == ("layers.0", "layers.1", "layers.4", "layers.5")
        for expert in (2, 3):
            model.layers[expert].reshard()


@distributed(2)
def test_canonical_order_gathers_each_group_by_itself() -> None:
    with apart() as mesh:
        together, alone = pair(mesh=mesh)
        step(together)
        step(alone)
        together.set_schedule(CanonicalOrder())
        assert launches_in(lambda: step(together)) >= 9
        together.set_schedule(None)
        step(alone)
        same_bits(together, alone)


@distributed(2)
def test_a_schedule_that_is_given_again_leaves_no_bucket_behind() -> None:
    with apart() as mesh:
        together, alone = pair(mesh=mesh)
        for each in (together, alone):
            step(each)
        schedule = schedule_of(together)
        assert schedule.buckets
        together.set_schedule(schedule)
        assert not schedule.buckets
        for each in (together, alone):
            step(each)
        same_bits(together, alone)


@distributed(2)
def test_reductions_that_cannot_join_are_launched_one_by_one_and_wait_for_room() -> None:
    """Each divides otherwise. Over gloo's own reduce-scatter, where nothing else joins them."""
    with private_memory():
        together, alone = pair()
        for model in (together, alone):
            for index, layer in enumerate(model.layers):
                layer.set_gradient_divide_factor(2.0 + index)
            model.set_reduce_scatter_max_input_buffers(1)
        travelling = []

        class AtEachLaunch:
            def on_event(self, event: Event) -> None:
                if event.kind is EventKind.REDUCE_SCATTER:
                    queue = the_state(together).context.shared.queue
                    travelling.append(len(queue._travelling))

        for index in range(2):
            step(alone, index)
            with observe(AtEachLaunch()):
                step(together, index)
            same_bits(together, alone)
        assert travelling == [0] * 10
