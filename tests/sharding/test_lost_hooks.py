"""Hooks on gradients that backward never calls are warned of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fullshard.sharding import fully_shard
from support.ranks import distributed
from support.surface.model import batch, build, sharded

HOOKS = ["register_hook", "register_post_accumulate_grad_hook"]


@pytest.mark.parametrize("register", HOOKS)
@distributed(2)
def test_hooks_of_parameters_that_are_replaced_are_warned_of(register: str) -> None:
    net = build()
    getattr(net.head.weight, register)(lambda tensor: None)
    with pytest.warns(RuntimeWarning, match=r"gradients of head\.weight are lost.* after fully"):
        sharded(net)


@distributed(2)
def test_hooks_on_sharded_parameters_that_are_never_called_are_warned_of() -> None:
    net, seen = sharded(build()), list[torch.Tensor]()
    net.get_parameter("blocks.1.fc1.bias").register_hook(seen.append)
    with pytest.warns(RuntimeWarning, match=r"the sharded blocks\.1\.fc1\.bias: backward never"):
        output = net(batch())
    output.sum().backward()
    assert not seen


@distributed(2)
def test_the_hooks_that_the_warnings_name_are_called_and_not_warned_of() -> None:
    net, seen = sharded(build()), list[Any]()
    net.head.bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    net(batch()).sum().backward()
    assert len(seen) == 1 and seen[0] is net.head.bias.grad


@distributed(2)
def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    net = build()
    net.head.weight.register_hook(lambda gradient: None)
    with pytest.raises(RuntimeWarning, match=r"head\.weight are lost"):
        fully_shard(net)
    sharded(build())
    assert type(net) is type(build()) and type(net.head.weight.data) is torch.Tensor
