"""The checks of the arguments of a sharded module's methods, and that nothing is half set."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.sharding import FSDPModule, register_fsdp_forward_method, share_comm_ctx
from support.ranks import distributed
from support.surface.errors import says
from support.surface.model import batch, build, sharded

METHODS: dict[str, tuple[Callable[[Any], Any], type[Exception], tuple[str, ...]]] = {
    "unshard": (lambda m: m.unshard(1), TypeError, ("async_op", "int", "True or False")),
    "sync": (
        lambda m: m.set_requires_gradient_sync("off"),
        TypeError,
        ("requires_gradient_sync", "str"),
    ),
    "sync recurse": (
        lambda m: m.set_requires_gradient_sync(True, recurse=1),
        TypeError,
        ("recurse", "int"),
    ),
    "last": (lambda m: m.set_is_last_backward(None), TypeError, ("is_last_backward", "NoneType")),
    "manual finalization": (
        lambda m: m.set_manual_backward_finalization(1),
        TypeError,
        ("enabled", "int"),
    ),
    "finalize": (
        lambda m: m.finalize_backward(async_op="yes"),
        TypeError,
        ("async_op", "str"),
    ),
    "keep storage": (lambda m: m.set_keep_unsharded_storage(None), TypeError, ("keep", "NoneType")),
    "gather on read": (
        lambda m: m.set_gather_on_read("yes"),
        TypeError,
        ("gather_on_read", "str"),
    ),
    "gather on read recurse": (
        lambda m: m.set_gather_on_read(True, recurse=1),
        TypeError,
        ("recurse", "int"),
    ),
    "canonical": (lambda m: m.set_canonical_order(1), TypeError, ("enable", "int")),
    "canonical slack": (
        lambda m: m.set_canonical_order(slack=1.5),
        TypeError,
        ("slack", "float"),
    ),
    "keep unsynced": (lambda m: m.set_keep_unsynced_gradients(1), TypeError, ("keep", "int")),
    "factor str": (lambda m: m.set_gradient_divide_factor("2"), TypeError, ("factor", "str")),
    "factor bool": (lambda m: m.set_gradient_divide_factor(True), TypeError, ("factor", "bool")),
    "factor of a bool": (
        lambda m: m.set_gradient_divide_factor(torch.tensor(True)),
        TypeError,
        ("factor", "torch.bool"),
    ),
    "factor of two": (
        lambda m: m.set_gradient_divide_factor(torch.ones(2)),
        ValueError,
        ("factor", "(2,)", "0-d"),
    ),
    "factor elsewhere": (
        lambda m: m.set_gradient_divide_factor(torch.ones((), device="meta")),
        ValueError,
        ("factor", "meta", "cpu"),
    ),
    "factor zero": (lambda m: m.set_gradient_divide_factor(0), ValueError, ("factor", "0")),
    "factor -1": (lambda m: m.set_gradient_divide_factor(-1.0), ValueError, ("factor", "-1.0")),
    "factor inf": (
        lambda m: m.set_gradient_divide_factor(float("inf")),
        ValueError,
        ("factor", "inf"),
    ),
    "factor nan": (
        lambda m: m.set_gradient_divide_factor(float("nan")),
        ValueError,
        ("factor", "nan"),
    ),
    "after forward": (
        lambda m: m.set_reshard_after_forward(2),
        TypeError,
        ("reshard_after_forward", "int"),
    ),
    "after forward recurse": (
        lambda m: m.set_reshard_after_forward(True, recurse="no"),
        TypeError,
        ("recurse", "str"),
    ),
    "after backward": (
        lambda m: m.set_reshard_after_backward(None),
        TypeError,
        ("reshard_after_backward", "NoneType"),
    ),
    "after backward recurse": (
        lambda m: m.set_reshard_after_backward(True, recurse=0),
        TypeError,
        ("recurse", "int"),
    ),
    "forward prefetch": (
        lambda m: m.set_modules_to_forward_prefetch(m.blocks[0]),
        TypeError,
        ("modules", "FSDPBlock", "list"),
    ),
    "forward prefetch plain": (
        lambda m: m.set_modules_to_forward_prefetch([m.blocks[0], m.stem]),
        TypeError,
        ("modules", "Linear", "fully_shard"),
    ),
    "backward prefetch": (
        lambda m: m.set_modules_to_backward_prefetch(None),
        TypeError,
        ("modules", "NoneType", "list"),
    ),
    "backward prefetch plain": (
        lambda m: m.set_modules_to_backward_prefetch([m.stem]),
        TypeError,
        ("modules", "Linear", "fully_shard"),
    ),
    "all-gather": (
        lambda m: m.set_custom_all_gather(dist.all_gather_into_tensor),
        TypeError,
        ("AllGather", "allocate"),
    ),
    "all-gather class": (
        lambda m: m.set_custom_all_gather(dict),
        TypeError,
        ("AllGather", "dict", "instance"),
    ),
    "all-gather None": (
        lambda m: m.set_custom_all_gather(None),
        TypeError,
        ("AllGather", "NoneType"),
    ),
    "reduce-scatter": (
        lambda m: m.set_custom_reduce_scatter("sum"),
        TypeError,
        ("ReduceScatter", "str", "allocate"),
    ),
    "all-reduce sync": (
        lambda m: m.set_requires_all_reduce(1),
        TypeError,
        ("requires_all_reduce", "int"),
    ),
    "all-reduce sync recurse": (
        lambda m: m.set_requires_all_reduce(True, recurse=None),
        TypeError,
        ("recurse", "NoneType"),
    ),
    "process group memory": (
        lambda m: m.set_allocate_memory_from_process_group_for_comm("yes"),
        TypeError,
        ("enable", "str"),
    ),
    "symmetric memory": (
        lambda m: m.set_symm_mem_for_comm("gloo"),
        ValueError,
        ("backend", "gloo", "NCCL"),
    ),
    "symmetric memory on the CPU": (
        lambda m: m.set_symm_mem_for_comm(),
        ValueError,
        ("set_symm_mem_for_comm", "CUDA", "cpu"),
    ),
    "force sum": (
        lambda m: m.set_force_sum_reduction_for_comms(0),
        TypeError,
        ("enable", "int"),
    ),
    "old factor": (
        lambda m: m.set_reduce_scatter_divide_factor("2"),
        TypeError,
        ("factor", "str"),
    ),
    "unused": (
        lambda m: m.set_reduce_scatter_unused_params(1),
        TypeError,
        ("reduce_scatter_unused_params", "int"),
    ),
    "unused recurse": (
        lambda m: m.set_reduce_scatter_unused_params(True, recurse=1),
        TypeError,
        ("recurse", "int"),
    ),
    "buffers": (
        lambda m: m.set_reduce_scatter_max_input_buffers("2"),
        TypeError,
        ("max_input_buffers", "str"),
    ),
    "buffers zero": (
        lambda m: m.set_reduce_scatter_max_input_buffers(0),
        ValueError,
        ("max_input_buffers", "0", "positive"),
    ),
    "buffers recurse": (
        lambda m: m.set_reduce_scatter_max_input_buffers(2, recurse="no"),
        TypeError,
        ("recurse", "str"),
    ),
    "bucket": (
        lambda m: m.set_reduce_bucket_cap("2"),
        TypeError,
        ("cap_mb", "str"),
    ),
    "bucket negative": (
        lambda m: m.set_reduce_bucket_cap(-1),
        ValueError,
        ("cap_mb", "-1", "finite"),
    ),
    "bucket recurse": (
        lambda m: m.set_reduce_bucket_cap(2, recurse="no"),
        TypeError,
        ("recurse", "str"),
    ),
    "gather bucket": (
        lambda m: m.set_gather_bucket_cap("2"),
        TypeError,
        ("cap_mb", "str"),
    ),
    "gather bucket negative": (
        lambda m: m.set_gather_bucket_cap(-1),
        ValueError,
        ("cap_mb", "-1", "finite"),
    ),
    "gather bucket recurse": (
        lambda m: m.set_gather_bucket_cap(2, recurse="no"),
        TypeError,
        ("recurse", "str"),
    ),
    "separate group": (
        lambda m: m.set_separate_reduce_scatter_group("yes"),
        TypeError,
        ("enable", "str"),
    ),
    "separate group recurse": (
        lambda m: m.set_separate_reduce_scatter_group(False, recurse=2),
        TypeError,
        ("recurse", "int"),
    ),
    "parameters changed": (
        lambda m: m.parameters_changed(recurse="all"),
        TypeError,
        ("recurse", "str"),
    ),
    "hook": (
        lambda m: m.set_all_reduce_hook("sum"),
        TypeError,
        ("hook", "str", "function"),
    ),
    "unshard in backward": (
        lambda m: m.set_unshard_in_backward(1),
        TypeError,
        ("unshard_in_backward", "int"),
    ),
    "post optim event": (
        lambda m: m.set_post_optim_event("step"),
        TypeError,
        ("event", "str", "torch.Event"),
    ),
    "share": (lambda m: share_comm_ctx([m, m.head]), TypeError, ("Linear", "fully_shard")),
    "share one": (lambda m: share_comm_ctx(m), TypeError, ("FSDPNet", "list")),
    "forward method": (
        lambda m: register_fsdp_forward_method(m, "generate"),
        ValueError,
        ("Net", "'generate'"),
    ),
    "forward method name": (
        lambda m: register_fsdp_forward_method(m, 3),  # type: ignore[arg-type]  # the point
        TypeError,
        ("method_name", "int"),
    ),
}


def test_every_method_that_takes_an_argument_has_a_case() -> None:
    called = {name for call, _, _ in METHODS.values() for name in call.__code__.co_names}
    for name, method in inspect.getmembers(FSDPModule, inspect.isfunction):
        takes_arguments = len(inspect.signature(method).parameters) > 1
        if takes_arguments and not name.startswith("_") and not hasattr(nn.Module, name):
            assert name in called


@pytest.mark.parametrize("case", METHODS)
@distributed(2)
def test_a_wrong_argument_of_a_method_is_an_error_that_names_it(case: str) -> None:
    call, error, words = METHODS[case]
    net = sharded(build())
    with pytest.raises(error, match=says(*words)):
        call(net)
    loss = net(batch()).sum()  # and nothing was half set
    loss.backward()
    weight: Any = net.head.weight
    reference: Any = build()
    reference(batch()).sum().backward()
    assert torch.equal(weight.grad.full_tensor(), reference.head.weight.grad)
