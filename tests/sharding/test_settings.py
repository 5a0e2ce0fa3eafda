"""What the setters of a sharded module change, beside torch's own on the same inputs.

Their argument errors are in ``test_arguments_methods``; what is set for accumulation, prefetching
and replicas is in the tests of those.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard.comm import DefaultReduceScatter, EventKind, EventLog, observe
from fullshard.sharding import fully_shard
from fullshard.sharding.hooks.lookup import the_state
from support.events.models import DIM, make_inputs, make_net
from support.events.recorder import (
    Recorder,
    Shard,
    assert_close_to,
    averaged_gradients,
    compare_with_torch,
    full_gradients,
    ours,
    record,
)
from support.modules import Assembled, in_turn
from support.parity.compare import EXACT, assert_equal, gradients_of
from support.ranks import distributed

TOKENS = 11


def embedded() -> Any:
    torch.manual_seed(0)
    return in_turn(embedding=nn.Embedding(TOKENS, DIM), body=make_net(None))


def branches() -> Any:
    torch.manual_seed(0)
    parts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
    return Assembled(lambda m, x, choice: m.parts[choice](x), parts=parts)


def _step(net: nn.Module, *, seed: int = 1) -> None:
    net(make_inputs(dist.get_rank(), seed=seed)).square().sum().backward()


def _plain_gradients() -> dict[str, torch.Tensor | None]:
    plain = make_net(None)
    _step(plain)
    return averaged_gradients(plain)


@distributed(2)
def test_a_module_whose_backward_needs_no_parameters_is_not_gathered_for_it() -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(TOKENS, (5,), generator=generator)

    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = embedded()
        shard(net.embedding)
        shard(net.body)
        shard(net)
        net.embedding.set_unshard_in_backward(False)
        recorder = record(net)
        net(tokens).square().sum().backward()
        return net, recorder

    mine, _ = compare_with_torch(scenario)
    assert mine.recorder.gathers.count("embedding") == 1
    assert mine.recorder.gathers.count("body") == 2
    plain = embedded()
    plain(tokens).square().sum().backward()
    assert_close_to(mine.gradients, averaged_gradients(plain))


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_resharding_after_forward_can_be_changed_between_steps(reshard: bool) -> None:
    def scenario(shard: Shard) -> tuple[nn.Module, Recorder]:
        net = make_net(shard, reshard_after_forward=not reshard)
        _step(net)
        net.zero_grad()
        net.set_reshard_after_forward(reshard)
        recorder = record(net)
        _step(net)
        return net, recorder

    mine, _ = compare_with_torch(scenario)
    assert len(mine.recorder.gathers) == (8 if reshard else 4)
    assert_close_to(mine.gradients, _plain_gradients())


@distributed(2)
def test_an_event_of_the_optimizer_is_waited_for_once() -> None:
    net = make_net(ours)
    event = torch.Event("cpu")
    net.set_post_optim_event(event)
    waited: list[Any] = []
    streams = the_state(net).context.shared.streams
    streams.synchronize_with_current = waited.append  # type: ignore[method-assign,assignment]
    for _ in range(2):
        net.zero_grad()
        _step(net)
    assert waited == [event, None]
    assert_close_to(full_gradients(net), _plain_gradients())


@distributed(4)
def test_a_hook_on_reduced_gradients_makes_a_hybrid_of_shards_inside() -> None:
    """Sharded over one axis; the hook adds up over the other, which the engine knows nothing of."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
    across = mesh.get_group("across")
    found = []
    for shard in (fully_shard, torch_fully_shard):
        net = make_net(shard, mesh=mesh["inside"])
        sizes: list[int] = []

        def add_up(reduced: torch.Tensor, sizes: list[int] = sizes) -> None:
            sizes.append(reduced.numel())
            dist.all_reduce(reduced, group=across)
            reduced /= 2

        for module in (net, *net.blocks):
            module.set_all_reduce_hook(add_up)
        _step(net)
        assert len(sizes) == 4
        found.append(full_gradients(net))
    assert_close_to(found[0], found[1])
    assert_close_to(found[0], _plain_gradients())


@pytest.mark.parametrize("zeros", [True, False])
@distributed(2)
def test_a_parameter_that_no_rank_used_gets_zeros_only_if_asked(zeros: bool) -> None:
    found = []
    shards: list[Callable[..., Any]] = [fully_shard]
    if zeros and hasattr(TorchModule, "set_reduce_scatter_unused_params"):  # not on torch 2.11
        shards.append(torch_fully_shard)
    for shard in shards:
        net = shard(branches())
        net.set_reduce_scatter_unused_params(zeros)
        x = make_inputs(dist.get_rank())
        net(x, choice=dist.get_rank()).square().sum().backward()
        found.append(full_gradients(net))
    unused = [found[0][f"parts.2.{name}"] for name in ("weight", "bias")]
    if zeros:
        assert_close_to(found[0], found[-1])
        assert all(grad is not None and not grad.any() for grad in unused)
    else:
        assert unused == [None, None]
    assert all(found[0][f"parts.{part}.weight"] is not None for part in (0, 1))


class _Counting(DefaultReduceScatter):
    """Counts reductions that were launched and not waited for, and notes over which ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.process_groups: list[dist.ProcessGroup] = []

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        assert work is not None
        self.process_groups.append(group)
        self.now += 1
        self.most = max(self.most, self.now)
        return cast(dist.Work, _Counted(work, self))


class _Counted:
    """A reduction's handle."""

    def __init__(self, work: dist.Work, counting: _Counting) -> None:
        self._work, self._counting, self._waited = work, counting, False

    def wait(self) -> bool:
        self._counting.now -= not self._waited
        self._waited = True
        return self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


@pytest.mark.parametrize("most", [1, 2, 3])
@distributed(2)
def test_as_many_reductions_are_in_flight_as_was_set(most: int) -> None:
    net, counting = make_net(ours), _Counting()
    for module in (net, *net.blocks):
        module.set_custom_reduce_scatter(counting)
    net.set_reduce_scatter_max_input_buffers(most)
    _step(net)
    assert counting.most == most
    assert_close_to(full_gradients(net), _plain_gradients())


@distributed(2)
def test_memory_of_a_process_group_that_has_none_is_refused_and_can_be_given_up() -> None:
    net = make_net(ours)
    net.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(ValueError, match="gloo"):
        _step(net)
    net.reset_iter_state()
    net.set_allocate_memory_from_process_group_for_comm(False)
    _step(net)
    assert_close_to(full_gradients(net), _plain_gradients())


@distributed(2)
def test_reductions_over_a_process_group_of_their_own_change_no_bit() -> None:
    found = []
    for separate in (False, True, None):
        net = make_net(ours)
        if separate is not False:
            net.set_separate_reduce_scatter_group()
        if separate is None:
            net.set_separate_reduce_scatter_group(False)
        comm = _Counting()
        net.set_custom_reduce_scatter(comm)
        _step(net)
        shared = the_state(net).own_groups[0].mesh_info.shard_process_group
        assert [group is shared for group in comm.process_groups] == [separate is not True]
        found.append(gradients_of(net))
    assert_equal(found[1], found[0], EXACT, "gradients")
    assert_equal(found[2], found[0], EXACT, "gradients")


@distributed(2)
def test_ranks_in_different_numbers_of_process_groups_are_told_so_and_do_not_hang() -> None:
    net, rank = make_net(ours), dist.get_rank()
    if rank == 1:  # it is in one more, and has made one more
        dist.new_group([1], use_local_synchronization=True)
    with pytest.raises(RuntimeError, match=r"different numbers of process groups.* rank 0 has"):
        net.set_separate_reduce_scatter_group()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    net.set_separate_reduce_scatter_group()
    _step(net)


@distributed(2)
def test_a_process_group_of_one_rank_that_all_ranks_make_is_no_reason_to_hang() -> None:
    """Before 2.15 torch names the next group differently on the two ranks: an error here."""
    net = make_net(ours)
    uneven = dist.new_group([1])  # rank 1 is in one more, and both have made it
    counts_groups_made = torch.__version__ >= "2.15"
    raises = pytest.raises(RuntimeError, match="different numbers of process groups")
    with nullcontext() if counts_groups_made else raises:
        net.set_separate_reduce_scatter_group()
        _step(net)
    if dist.get_rank() == 1:
        dist.destroy_process_group(uneven)


@distributed(2)
def test_the_deprecated_name_of_the_divide_factor_still_divides() -> None:
    log = EventLog()
    net = make_net(ours)
    for module in (net, *net.blocks):
        module.set_reduce_scatter_divide_factor(1.0)
    with observe(log):
        _step(net)
    assert len(log.named(EventKind.REDUCE)) == 4
    summed = {name: 2 * grad for name, grad in _plain_gradients().items() if grad is not None}
    assert_close_to(full_gradients(net), dict(summed))
