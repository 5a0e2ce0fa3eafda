"""What a sharded module can do beyond forward: other methods, unshard, roots, shared streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import EventKind, EventLog, observe
from fullshard.sharding import (
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from support.parity.compare import full
from support.ranks import distributed
from support.surface.model import WIDTH, batch, build, sharded, train


class _Model(nn.Linear):
    """Has a second way to be called, which forward does not use."""

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """What a user calls instead of forward."""
        assert not isinstance(self.weight, DTensor)
        if scale < 0:
            raise ValueError("scale is negative")
        return scale * torch.tanh(x @ self.weight.T)


# -- register_fsdp_forward_method -----------------------------------------------------------------


@distributed(2, 4)
def test_a_registered_method_gathers_reduces_and_reshards_as_forward_does() -> None:
    torch.manual_seed(0)
    net: Any = _Model(WIDTH, 5)
    reference: Any = nn.Linear(WIDTH, 5)
    reference.load_state_dict(net.state_dict())
    fully_shard(net, reshard_after_forward=True)
    register_fsdp_forward_method(net, "encode")
    assert (net.encode.__name__, net.encode.__doc__) == ("encode", _Model.encode.__doc__)
    log = EventLog()
    with observe(log):
        output = net.encode(batch(), scale=2.0)
        assert isinstance(net.weight, DTensor)
        output.sum().backward()
    expected = 2.0 * torch.tanh(batch() @ reference.weight.T)
    assert torch.equal(output, expected)
    expected.sum().backward()
    grad: Any = net.weight.grad
    torch.testing.assert_close(grad.full_tensor(), reference.weight.grad)
    assert log.kinds().count(EventKind.UNSHARD) == 2
    assert log.kinds().count(EventKind.REDUCE) == 1
    assert net.bias.grad is None  # no rank used it


@distributed(2)
def test_registering_a_method_of_a_module_that_is_not_sharded_does_nothing() -> None:
    plain = _Model(WIDTH, 5)
    register_fsdp_forward_method(plain, "encode")
    assert "encode" not in vars(plain)
    register_fsdp_forward_method(plain, "no_such_method")


@distributed(2)
def test_a_registered_method_that_raises_leaves_the_module_usable() -> None:
    net: Any = fully_shard(_Model(WIDTH, 5), reshard_after_forward=True)
    register_fsdp_forward_method(net, "encode")
    with pytest.raises(ValueError, match="scale is negative"):
        net.encode(batch(), scale=-1.0)
    assert isinstance(net.weight, DTensor)
    net.encode(batch()).sum().backward()
    assert net.weight.grad is not None


# -- unshard and reshard --------------------------------------------------------------------------


@distributed(2, 4)
def test_unshard_puts_the_full_values_of_its_own_group_only() -> None:
    plain: Any = build()
    net: Any = sharded(build())
    assert net.unshard() is None
    assert not isinstance(net.stem.weight, DTensor)
    assert torch.equal(net.stem.weight, plain.stem.weight)
    assert isinstance(net.stem.weight, nn.Parameter)
    assert isinstance(net.blocks[0].fc1.weight, DTensor)
    net.reshard()
    assert isinstance(net.stem.weight, DTensor)
    assert torch.equal(net.stem.weight.full_tensor(), plain.stem.weight)


# -- roots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_backward", [False, True])
@distributed(2)
def test_a_child_that_ran_as_its_own_root_is_adopted_by_its_parent(with_backward: bool) -> None:
    reference, net = build(), sharded(build())
    for model in (net, reference):
        output = model.blocks[0](batch())
        if with_backward:
            output.sum().backward()
            model.zero_grad()
    block: Any = net.blocks[0]
    if with_backward:
        block.reset_iter_state()  # it is its own root as yet
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in (net, reference))
    assert train(net, ours, range(2)) == train(reference, theirs, range(2))
    with pytest.raises(RuntimeError, match="not the root"):
        block.reset_iter_state()


@distributed(2)
def test_after_adoption_the_child_can_still_run_by_itself() -> None:
    reference: Any = build()
    net: Any = sharded(build())
    for model in (net, reference):
        model(batch()).sum().backward()
        model.blocks[1](batch()).sum().backward()
    torch.testing.assert_close(
        net.blocks[1].fc1.weight.grad.full_tensor(), reference.blocks[1].fc1.weight.grad
    )


@distributed(2)
def test_a_list_as_the_root_names_its_parameters_by_their_place_in_it() -> None:
    net = build()
    several: list[nn.Module] = [net.stem, net.head]
    fully_shard(several)
    for module in several:
        for name in list(module._parameters):
            module._parameters[name] = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"^\[0\]\.weight was replaced"):
        net.stem(batch())


# -- share_comm_ctx -------------------------------------------------------------------------------


@distributed(2)
def test_roots_that_share_their_streams_train_as_without_sharing() -> None:
    plain, shared = ([build(seed) for seed in (0, 1)] for _ in range(2))
    for net in shared:
        sharded(net)
    stages: list[Any] = shared
    share_comm_ctx([])
    share_comm_ctx(stages)
    for nets in (plain, shared):
        first, second = nets
        x = first(batch())
        second(torch.cat([x, x], dim=1)).sum().backward()
    for ours, theirs in zip(shared, plain, strict=True):
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(full(one.grad), other.grad, msg=name)
