"""``unsharded``: full parameters for a block, sharded again after it, however it ends."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.policies import DepthPrefetch, MixedPrecisionPolicy
from fullshard.sharding import unsharded
from support.events.models import Net, batch, make_net
from support.events.recorder import assert_gradients_of, group_of, ours, record
from support.parity.compare import parameters_of
from support.ranks import distributed
from support.surface.errors import says
from support.surface.ranks import everyone

WAYS = pytest.mark.parametrize("cpu", [False, True], ids=["device", "cpu"])
RANKS = pytest.mark.parametrize("rank0", [False, True], ids=["all-ranks", "rank0"])


def assert_sharded(net: nn.Module) -> None:
    """Every parameter is a ``DTensor`` again."""
    assert all(isinstance(param, DTensor) for param in net.parameters())


def assert_full(net: nn.Module, wanted: nn.Module) -> None:
    """Every parameter is plain and equals ``wanted``'s."""
    for name, param in net.named_parameters():
        assert isinstance(param, nn.Parameter) and not isinstance(param, DTensor), name
        assert torch.equal(param, wanted.get_parameter(name)), name


def change(net: nn.Module) -> None:
    """Changes every parameter, each otherwise, and one of them by replacing it."""
    with torch.no_grad():
        for number, param in enumerate(net.parameters()):
            param.add_(number + 1)
        bias = net.get_submodule("head").bias
        assert isinstance(bias, nn.Parameter)
        net.get_submodule("head").bias = nn.Parameter(bias.detach().clone().mul_(2))


@pytest.mark.cross
@WAYS
@RANKS
@pytest.mark.parametrize("writeback", [True, False], ids=["write", "drop"])
@distributed(2, 4, matrix=[4])
def test_changes_reach_the_shards_if_they_are_written_back_and_are_lost_if_not(
    cpu: bool, rank0: bool, writeback: bool
) -> None:
    net, whole = make_net(ours, reshard_after_forward=False), make_net(None)
    with torch.no_grad():
        net(batch())  # leaves copies unsharded, which must not serve after a change
    with unsharded(net, writeback=writeback, rank0_only=rank0, offload_to_cpu=cpu):
        if not rank0 or dist.get_rank() == 0:
            assert_full(net, whole)
            change(net)
        else:
            assert_sharded(net)
    assert_sharded(net)
    if writeback:
        change(whole)
    wanted = dict(whole.named_parameters())
    for name, value in parameters_of(net).items():
        assert value is not None and torch.equal(value, wanted[name]), name
    with torch.no_grad():
        assert torch.equal(net(batch()), whole(batch()))


# -- forward inside -------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_forwards_inside_gather_nothing_and_see_changes(reshard: bool | None) -> None:
    net, whole = make_net(ours, reshard_after_forward=reshard), make_net(None)
    with unsharded(net):
        recorder = record(net)
        with torch.no_grad():
            for seed in range(3):
                assert torch.equal(net(batch(seed=seed)), whole(batch(seed=seed)))
            net.get_parameter("head.bias").add_(1)
            whole.get_parameter("head.bias").add_(1)
            assert torch.equal(net(batch()), whole(batch()))
        assert recorder.gathers == []
    assert_sharded(net)


@distributed(2, 4, matrix=[4])
def test_the_first_rank_alone_may_run_forward_where_it_alone_is_full() -> None:
    net, whole = make_net(ours, prefetch_policy=DepthPrefetch()), make_net(None)
    with unsharded(net, rank0_only=True):
        if dist.get_rank() == 0:
            output = net.blocks[1](batch())  # not in the order of a step
            assert not output.requires_grad
            assert torch.equal(net(batch()), whole(batch()))
        else:
            with pytest.raises(RuntimeError, match=says("(root)", "rank0_only")):
                net(batch())
    recorder = record(net)
    net(batch()).sum().backward()
    assert all(each == recorder.calls for each in everyone(recorder.calls))


@distributed(2)
def test_copies_on_the_cpu_are_for_no_forward() -> None:
    net = make_net(ours)
    with unsharded(net, offload_to_cpu=True):
        with pytest.raises(RuntimeError, match=says("(root)", "offload_to_cpu")):
            net(batch())
        with pytest.raises(RuntimeError, match=says("blocks.1")):
            net.blocks[1](batch())
    net(batch()).sum().backward()


@distributed(2)
def test_a_state_dict_of_copies_on_the_cpu_is_the_full_one_and_stays() -> None:
    net, whole = make_net(ours), make_net(None)
    with unsharded(net, rank0_only=True, offload_to_cpu=True):
        state = net.state_dict() if dist.get_rank() == 0 else {}
    net(batch())
    if dist.get_rank() == 0:
        whole.load_state_dict(state)
        assert state.keys() == whole.state_dict().keys()
        for name, value in make_net(None).state_dict().items():
            assert torch.equal(state[name], value)


# -- mixed precision ------------------------------------------------------------------------------


@RANKS
@distributed(2)
def test_what_did_not_change_keeps_the_precision_in_which_it_is_stored(rank0: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    net, before = make_net(ours, mp_policy=policy), make_net(None)
    with unsharded(net, writeback=True, rank0_only=rank0):
        if not rank0 or dist.get_rank() == 0:
            weight = net.get_parameter("head.weight")
            assert weight.dtype is torch.bfloat16
            with torch.no_grad():
                weight[1] = 3.0
    wanted = before.state_dict()
    wanted["head.weight"][1] = 3.0
    for name, param in net.named_parameters():
        assert isinstance(param, DTensor) and param.dtype is torch.float32
        assert torch.equal(param.full_tensor(), wanted[name]), name


# -- what is opened -------------------------------------------------------------------------------


@distributed(2)
def test_without_recursion_only_the_modules_own_group_is_opened() -> None:
    net = make_net(ours)
    with unsharded(net, recurse=False):
        assert not isinstance(net.head.weight, DTensor)
        assert_sharded(net.blocks)
    assert_sharded(net)


@WAYS
@distributed(2)
def test_a_module_that_is_not_sharded_itself_opens_the_groups_that_hold_its_parameters(
    cpu: bool,
) -> None:
    net, whole = make_net(ours), make_net(None)
    net(batch())
    for part in ("blocks", "head", "blocks.0.up"):
        with unsharded(net.get_submodule(part), offload_to_cpu=cpu):
            assert_full(net.get_submodule(part), whole.get_submodule(part))
    assert_sharded(net)


def test_a_module_without_sharded_parameters_is_left_as_it_is() -> None:
    net = Net()
    before = dict(net.named_parameters())
    with unsharded(net, writeback=True, rank0_only=True, offload_to_cpu=True):
        assert all(param is before[name] for name, param in net.named_parameters())
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


@distributed(2)
def test_a_block_before_the_first_forward_may_be_on_a_part() -> None:
    net, whole = make_net(ours), make_net(None)
    with unsharded(net.blocks[1], writeback=True), torch.no_grad():
        net.blocks[1].up.bias.add_(1)
    whole.blocks[1].up.bias.data.add_(1)
    assert torch.equal(net(batch()), whole(batch()))


# -- how it ends ----------------------------------------------------------------------------------


@WAYS
@RANKS
@pytest.mark.parametrize("on_all", [True, False], ids=["on all ranks", "on one rank"])
@distributed(2)
def test_an_exception_inside_leaves_the_model_sharded_and_as_it_was(
    on_all: bool, cpu: bool, rank0: bool
) -> None:
    net, whole = make_net(ours), make_net(None)
    raises = on_all or dist.get_rank() == 1
    with (
        pytest.raises(
            ZeroDivisionError if raises else RuntimeError,
            match="by zero" if raises else says("any rank", "another rank raised"),
        ),
        unsharded(net, writeback=True, rank0_only=rank0, offload_to_cpu=cpu),
    ):
        if not rank0 or dist.get_rank() == 0:
            change(net)
        if raises:
            raise ZeroDivisionError("by zero")
    assert_sharded(net)
    assert torch.equal(net(batch()), whole(batch()))


@WAYS
@distributed(2)
def test_a_parameter_of_another_shape_is_refused_by_name(cpu: bool) -> None:
    net, whole = make_net(ours), make_net(None)
    with (
        pytest.raises(RuntimeError, match=says("blocks.1.up.bias", "(3,)", "(16,)")),
        unsharded(net, writeback=True, offload_to_cpu=cpu),
    ):
        net.blocks[1].up.bias = nn.Parameter(torch.zeros(3))
    assert_sharded(net)
    assert torch.equal(net(batch()), whole(batch()))


@pytest.mark.parametrize("how", ["reshard", "state_dict", "step"])
@distributed(2)
def test_changes_that_were_lost_inside_are_not_lost_silently(how: str) -> None:
    net = make_net(ours)
    optimizer = torch.optim.SGD(list(net.parameters()), lr=0.1)
    net(batch()).sum().backward()
    with (
        pytest.raises(RuntimeError, match=says("blocks.1", how)),
        unsharded(net, writeback=True),
        torch.no_grad(),
    ):
        net.blocks[1].up.bias.add_(1)
        if how == "step":
            optimizer.step()
            net.blocks[1](batch())
        else:
            getattr(net.blocks[1], how)()
    assert_sharded(net)


@distributed(2)
def test_an_error_of_a_gather_on_entry_leaves_nothing_open() -> None:
    net, whole = make_net(ours), make_net(None)
    net(batch())
    group = group_of(net.blocks[2])
    comm = group.gathering.config.comm

    class Broken:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise MemoryError("no room")

        allocate = __call__

    broken: Any = Broken()
    group.gathering.set_comm(broken)
    with pytest.raises(MemoryError), unsharded(net):
        raise AssertionError("the block is not reached")
    group.gathering.set_comm(comm)
    assert_sharded(net)
    with unsharded(net):
        assert_full(net, whole)


# -- nesting, and where it is refused -------------------------------------------------------------


@distributed(2)
def test_blocks_nest_and_the_outermost_writes_back_for_both() -> None:
    net, whole = make_net(ours), make_net(None)
    with unsharded(net), torch.no_grad():
        with unsharded(net.blocks[1], writeback=True):
            net.blocks[1].up.bias.add_(1)
        assert torch.equal(net.blocks[1].up.bias, whole.blocks[1].up.bias + 1)
        net.head.bias.add_(1)  # of a group that no block writes back
    assert_sharded(net)
    whole.blocks[1].up.bias.data.add_(1)
    assert torch.equal(net(batch()), whole(batch()))


@distributed(2)
def test_an_inner_block_that_raised_is_written_back_by_none() -> None:
    net, whole = make_net(ours), make_net(None)
    with (
        pytest.raises(RuntimeError, match=says("inside this one raised")),
        unsharded(net),
        torch.no_grad(),
        pytest.raises(ZeroDivisionError),
        unsharded(net.blocks[1], writeback=True),
    ):
        net.blocks[1].up.bias.add_(1)
        raise ZeroDivisionError
    assert torch.equal(net(batch()), whole(batch()))


@distributed(2)
def test_blocks_of_two_models_may_write_back_together() -> None:
    one, other = make_net(ours), make_net(ours)
    with unsharded(one, writeback=True), unsharded(other, writeback=True), torch.no_grad():
        for first, second in zip(one.parameters(), other.parameters(), strict=True):
            first.add_(1)
            second.copy_(first)
    whole = make_net(None)
    for net in (one, other):
        for name, value in parameters_of(net).items():
            assert value is not None and torch.equal(value, whole.get_parameter(name) + 1)


@pytest.mark.parametrize("outer", ["rank0_only", "offload_to_cpu", ""])
@distributed(2)
def test_blocks_that_are_not_the_same_on_all_ranks_do_not_nest(outer: str) -> None:
    net = make_net(ours)
    inner = "" if outer else "offload_to_cpu"
    with (
        unsharded(net, **{outer: True} if outer else {}),
        pytest.raises(RuntimeError, match=says("another unsharded()", "nested")),
        unsharded(net.blocks[0], **{inner: True} if inner else {}),
    ):
        raise AssertionError("the block is not reached")
    assert_sharded(net)


@distributed(2)
def test_in_the_middle_of_forward_or_backward_it_is_refused() -> None:
    net, whole = make_net(ours), make_net(None)
    told: list[str] = []

    def enter(*args: Any) -> None:
        for module in (net, net.blocks[2], net.head):
            try:
                with unsharded(module):
                    raise AssertionError("entered")
            except RuntimeError as error:
                told.append(str(error))

    net.blocks[1].register_forward_hook(enter)
    output = net(batch())
    output.register_hook(enter)
    output.sum().backward()
    assert len(told) == 6
    assert all(re.search(r"in the middle of (a|its) forward or backward", each) for each in told)
    assert torch.equal(net(batch()), whole(batch()))


@pytest.mark.parametrize(("inside", "cpu"), [(True, False), (True, True), (False, False)])
@distributed(2)
def test_what_a_user_unshards_before_or_inside_stays_unsharded(inside: bool, cpu: bool) -> None:
    net, whole = make_net(ours), make_net(None)
    if inside:
        net(batch())
    else:
        net.blocks[0].unshard()
    with unsharded(net, offload_to_cpu=cpu):
        if inside:
            net.blocks[0].unshard()
    assert_full(net.blocks[0], whole.blocks[0])
    assert_sharded(net.blocks[1])
    assert torch.equal(net(batch()), whole(batch()))


@distributed(2)
def test_a_freeze_inside_stays() -> None:
    net = make_net(ours)
    with unsharded(net):
        net.blocks[0].requires_grad_(False)
    assert not any(param.requires_grad for param in net.blocks[0].parameters())
    net(batch()).sum().backward()
    assert all(param.grad is None for param in net.blocks[0].parameters())


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match=says("module is a str")), unsharded("net"):  # type: ignore[arg-type]  # what is tested
        pass
    for name in ("writeback", "rank0_only", "offload_to_cpu", "recurse"):
        arguments: dict[str, Any] = {name: 1}
        with pytest.raises(TypeError, match=says(name)), unsharded(nn.Linear(1, 1), **arguments):
            pass


# -- while a graph lives --------------------------------------------------------------------------


def _halve(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.5)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("finished", [True, False], ids=["finished graph", "open graph"])
@distributed(2, 4)
def test_each_rank_writes_into_memory_of_its_own_while_a_loss_lives(
    finished: bool, reshard: bool
) -> None:
    net, whole = make_net(ours, reshard_after_forward=reshard), make_net(None)
    losses = [model(batch()).square().mean() for model in (net, whole)]
    if finished:
        for loss in losses:
            loss.backward()
    for _ in range(2):
        with unsharded(net, writeback=True):
            _halve(net)
        _halve(whole)
    wanted = dict(whole.named_parameters())
    for name, value in parameters_of(net).items():
        assert value is not None and torch.equal(value, wanted[name]), name
    with torch.no_grad():
        assert torch.equal(net(batch()), whole(batch()))


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_a_graph_from_before_a_block_has_its_backward_after_it(reshard: bool) -> None:
    net, whole = make_net(ours, reshard_after_forward=reshard), make_net(None)
    loss = net(batch()).square().sum()
    with unsharded(net), torch.no_grad():
        assert torch.equal(net(batch()), whole(batch()))
    loss.backward()
    whole(batch()).square().sum().backward()
    assert_gradients_of(net, whole)


@distributed(2)
def test_a_graph_from_before_a_block_may_have_its_backward_inside() -> None:
    net, whole = make_net(ours), make_net(None)
    loss = net(batch()).square().sum()
    with unsharded(net, writeback=True):
        loss.backward()
    whole(batch()).square().sum().backward()
    assert_gradients_of(net, whole)


@distributed(2)
def test_a_graph_from_inside_a_block_may_have_its_backward_after_it() -> None:
    net, whole = make_net(ours), make_net(None)
    kept = net(batch()).square().sum()  # its graph keeps the memory of the parameters
    with unsharded(net, writeback=True):
        loss = net(batch()).square().sum()
    loss.backward()
    whole(batch()).square().sum().backward()
    assert_gradients_of(net, whole)
    del kept


@distributed(2)
def test_a_backward_that_would_read_changed_parameters_is_refused() -> None:
    net = make_net(ours)
    loss = net(batch()).square().sum()
    with unsharded(net, writeback=True):
        _halve(net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
