"""torch's private names, and nothing else: the one file of this package that may use them.

Each function says why the private name is needed and on which torch versions it was seen. The rest
of the package is written against these functions, so a change in torch is a change in this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "ShardingSpec",
    "current_graph_task",
    "local_shard",
    "make_dtensor",
    "make_spec",
    "node_made_since",
    "post_accumulate_grad_hooks",
    "queue_end_of_backward",
    "sequence_of",
    "spec_of",
]

ShardingSpec = DTensorSpec
"""Mesh, placements, global shape and dtype of a DTensor (``DTensorSpec``: 2.11, 2.13)."""


def make_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], like: torch.Tensor
) -> ShardingSpec:
    """Returns the spec of a DTensor whose full tensor has the shape and dtype of ``like``.

    ``DTensor.from_local`` would build the same spec anew, with an autograd node, at each call; a
    gradient is made at every step, so the spec is made once (``_dtensor_spec``: 2.11, 2.13).
    """
    full = torch.empty(like.shape, dtype=like.dtype, device="meta")
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def make_dtensor(local: torch.Tensor, spec: ShardingSpec) -> DTensor:
    """Returns the DTensor of ``local`` under ``spec``: no copy, no check, no autograd node.

    The constructor is not public. ``from_local`` took 22 us where this took 4, on a CPU with 2.13.
    """
    constructor = cast(Callable[..., DTensor], DTensor)
    return constructor(local, spec, requires_grad=False)


def spec_of(tensor: DTensor) -> ShardingSpec:
    """Returns the spec of ``tensor`` (``_spec``: 2.11, 2.13)."""
    return tensor._spec


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a DTensor, outside autograd.

    ``to_local()`` records a node and waits; the engine reads a shard at each gather
    (``_local_tensor``: 2.11, 2.13).
    """
    return cast(DTensor, tensor)._local_tensor


def current_graph_task() -> int:
    """Returns the id of the backward that this thread is inside of, or -1.

    There is no public way to ask whether a forward is a recomputation inside a backward
    (``torch._C._current_graph_task_id``: 2.11, 2.13).
    """
    return torch._C._current_graph_task_id()


def node_made_since(tensor: torch.Tensor, sequence: int) -> torch.autograd.graph.Node | None:
    """Returns the autograd node of the tensor that ``tensor`` is a view of, if it is young enough.

    Args:
        tensor: an output of a forward.
        sequence: the number of the first node that the forward made.

    A change in place of a view gives the view a new node and leaves its base's, so what watches a
    view must watch its base (``_is_view``, ``_base``, ``_sequence_nr``: 2.11, 2.13).
    """
    if not tensor._is_view() or tensor._base is None:
        return None
    node = tensor._base.grad_fn
    return node if node is not None and node._sequence_nr() >= sequence else None


def sequence_of(tensor: torch.Tensor) -> int:
    """Returns the number of the node that made ``tensor`` (``_sequence_nr``: 2.11, 2.13)."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the present backward ends without an error.

    DDP and every sharded data parallel engine depend on it; it has no public name
    (``_execution_engine.queue_callback``: 2.11, 2.13).
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def post_accumulate_grad_hooks(param: nn.Parameter) -> list[Callable[[torch.Tensor], None]]:
    """Returns the hooks that the user registered with ``register_post_accumulate_grad_hook``.

    Autograd does not run them for us, as a sharded gradient is assigned, not accumulated by it
    (``_post_accumulate_grad_hooks``: 2.11, 2.13).
    """
    hooks: Any = param._post_accumulate_grad_hooks
    return list(hooks.values()) if hooks else []
