"""The checks of the arguments of a sharded module's methods, and that nothing is half set."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.sharding import (
    FSDPModule,
    ShardingPlacements,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from support.products import few
from support.ranks import distributed
from support.surface.errors import says
from support.surface.model import batch, build, sharded


@dataclass(frozen=True)
class Wrong:
    """A wrong call of a method of a sharded net, or of a function of it.

    Attributes:
        method: the method, or the function.
        args: what it is given; a function of the net if it needs its modules.
        error: what it raises.
        words: what the message says.
        named: arguments by name.
    """

    method: str | Callable[..., Any]
    args: tuple[Any, ...] | Callable[[Any], tuple[Any, ...]]
    error: type[Exception]
    words: tuple[str, ...]
    named: dict[str, Any] = field(default_factory=dict)

    def call(self, net: Any) -> None:
        args = self.args(net) if callable(self.args) else self.args
        method = getattr(net, self.method) if isinstance(self.method, str) else self.method
        method(*args, **self.named)

    def __str__(self) -> str:
        name = self.method if isinstance(self.method, str) else self.method.__name__
        return f"{name}: {', '.join(self.words)}"


def not_a_bool(method: str, argument: str, *, recurses: bool = True) -> list[Wrong]:
    """What a method refuses that takes one flag, and says whether it recurses."""
    flag = Wrong(method, ("yes",), TypeError, (argument, "'yes'", "str"))
    return [flag, does_not_recurse(method, True)] if recurses else [flag]


def does_not_recurse(method: str, *args: Any) -> Wrong:
    return Wrong(method, args, TypeError, ("recurse", "int"), {"recurse": 1})


def no_modules(method: str) -> list[Wrong]:
    return [
        Wrong(method, lambda net: (net.blocks[0],), TypeError, ("modules", "FSDPBlock", "list")),
        Wrong(method, (None,), TypeError, ("modules", "NoneType", "list")),
        Wrong(
            method,
            lambda net: ([net.blocks[0], net.stem],),
            TypeError,
            ("modules", "Linear", "fully_shard"),
        ),
    ]


FACTOR = "set_gradient_divide_factor"
BUFFERS = "set_reduce_scatter_max_input_buffers"
WRONG = [
    Wrong("unshard", (1,), TypeError, ("async_op", "int", "True or False")),
    *not_a_bool("set_requires_gradient_sync", "requires_gradient_sync"),
    *not_a_bool("set_is_last_backward", "is_last_backward", recurses=False),
    *not_a_bool("set_manual_backward_finalization", "enabled", recurses=False),
    Wrong("finalize_backward", (), TypeError, ("async_op", "'yes'", "str"), {"async_op": "yes"}),
    *not_a_bool("set_keep_unsharded_storage", "keep"),
    Wrong("set_placements", ("inner",), TypeError, ("placements", "str", "ShardingPlacements")),
    does_not_recurse("set_placements", ShardingPlacements()),
    Wrong("set_schedule", (True,), TypeError, ("schedule", "bool", "Schedule", "None")),
    *(
        Wrong(FACTOR, (value,), error, ("factor", *words))
        for value, error, *words in (
            ("2", TypeError, "str"),
            (True, TypeError, "bool"),
            (torch.tensor(True), TypeError, "torch.bool"),
            (torch.ones(2), ValueError, "(2,)", "0-d"),
            (torch.ones((), device="meta"), ValueError, "meta", "cpu"),
            (0, ValueError, "0"),
            (-1.0, ValueError, "-1.0"),
            (math.inf, ValueError, "inf"),
            (math.nan, ValueError, "nan"),
        )
    ),
    Wrong("set_reduce_scatter_divide_factor", ("2",), TypeError, ("factor", "str")),
    *not_a_bool("set_reshard_after_forward", "reshard_after_forward"),
    *not_a_bool("set_reshard_after_backward", "reshard_after_backward"),
    *no_modules("set_modules_to_forward_prefetch"),
    *no_modules("set_modules_to_backward_prefetch"),
    Wrong(
        "set_custom_all_gather",
        (dist.all_gather_into_tensor,),
        TypeError,
        ("AllGather", "allocate"),
    ),
    Wrong("set_custom_all_gather", (dict,), TypeError, ("AllGather", "dict", "instance")),
    Wrong("set_custom_all_gather", (None,), TypeError, ("AllGather", "NoneType")),
    Wrong("set_custom_reduce_scatter", ("sum",), TypeError, ("ReduceScatter", "str", "allocate")),
    *not_a_bool("set_requires_all_reduce", "requires_all_reduce"),
    *not_a_bool("set_allocate_memory_from_process_group_for_comm", "enable", recurses=False),
    Wrong("set_symm_mem_for_comm", ("gloo",), ValueError, ("backend", "gloo", "NCCL")),
    Wrong("set_symm_mem_for_comm", (), ValueError, ("set_symm_mem_for_comm", "CUDA", "cpu")),
    *not_a_bool("set_force_sum_reduction_for_comms", "enable", recurses=False),
    *not_a_bool("set_reduce_scatter_unused_params", "reduce_scatter_unused_params"),
    Wrong(BUFFERS, ("2",), TypeError, ("max_input_buffers", "str")),
    Wrong(BUFFERS, (0,), ValueError, ("max_input_buffers", "0", "positive")),
    does_not_recurse(BUFFERS, 2),
    *not_a_bool("set_separate_reduce_scatter_group", "enable"),
    does_not_recurse("parameters_changed"),
    Wrong("set_all_reduce_hook", ("sum",), TypeError, ("hook", "str", "function")),
    *not_a_bool("set_unshard_in_backward", "unshard_in_backward", recurses=False),
    Wrong("set_post_optim_event", ("step",), TypeError, ("event", "str", "torch.Event")),
    Wrong(share_comm_ctx, lambda net: ([net, net.head],), TypeError, ("Linear", "fully_shard")),
    Wrong(share_comm_ctx, lambda net: (net,), TypeError, ("FSDPNet", "list")),
    Wrong(
        register_fsdp_forward_method,
        lambda net: (net, "generate"),
        ValueError,
        ("Net", "'generate'"),
    ),
    Wrong(register_fsdp_forward_method, lambda net: (net, 3), TypeError, ("method_name", "int")),
]


def test_every_method_that_takes_an_argument_has_a_case() -> None:
    called = {wrong.method for wrong in WRONG}
    for name, method in inspect.getmembers(FSDPModule, inspect.isfunction):
        takes_arguments = len(inspect.signature(method).parameters) > 1
        if takes_arguments and not name.startswith("_") and not hasattr(nn.Module, name):
            assert name in called


# Of each method one; the others of a method take the same path.
_FIRST = {wrong.method: wrong for wrong in reversed(WRONG)}


@pytest.mark.parametrize("wrong", few(WRONG, *_FIRST.values()), ids=str)
@distributed(2)
def test_a_wrong_argument_of_a_method_is_an_error_that_names_it(wrong: Wrong) -> None:
    net = sharded(build())
    with pytest.raises(wrong.error, match=says(*wrong.words)):
        wrong.call(net)
    loss = net(batch()).sum()  # and nothing was half set
    loss.backward()
    weight: Any = net.head.weight
    reference: Any = build()
    reference(batch()).sum().backward()
    assert torch.equal(weight.grad.full_tensor(), reference.head.weight.grad)
