"""Private names of torch that several rooms of this package use, each with the reason.

A room with private names of its own has its own ``compat``; no other file uses any. Seen on torch
2.11, 2.13 and 2.15, but for names with a version in their docstring.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import repeat
from operator import attrgetter, methodcaller
from types import FunctionType
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd import forward_ad
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.hooks import unserializable_hook

__all__ = [
    "FREED",
    "ShardingSpec",
    "add_tensor_hook",
    "concatenated_mesh",
    "current_graph_task",
    "empty_data",
    "finished",
    "flatten",
    "flatten_mesh",
    "forget_hooks",
    "functorch_is_active",
    "gradients_of",
    "hooks_after_accumulation",
    "hooks_on_gradient",
    "in_transform",
    "is_legacy_batched",
    "local_of",
    "local_shard",
    "local_shard_getter",
    "local_shards",
    "make_dtensor",
    "make_parameter",
    "make_spec",
    "mark_sharded",
    "node_made_since",
    "not_pickled",
    "registered_node",
    "retire_aliases",
    "sequence_of",
    "set_local_shard",
    "set_spec",
    "set_versions",
    "spec_of",
    "specs_of",
    "storage_of",
    "strided_shard",
    "swap_impl",
    "untraced",
    "version_of",
    "will_execute",
    "without_functorch",
    "without_torch_function",
]

ShardingSpec = DTensorSpec
"""Mesh, placements, global shape and dtype of a DTensor (``DTensorSpec``)."""

_specs: WeakValueDictionary[tuple[object, ...], ShardingSpec] = WeakValueDictionary()


def make_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], like: torch.Tensor
) -> ShardingSpec:
    """Return the spec of a DTensor whose full tensor has the shape and dtype of ``like``.

    Equal specs are one object. ``DTensor.from_local`` would build a spec and an autograd node for
    every gradient of every step (``_dtensor_spec``).
    """
    key = (id(mesh), placements, like.shape, like.dtype)  # a spec keeps its mesh alive
    spec = _specs.get(key)
    if spec is None:
        full = torch.empty(like.shape, dtype=like.dtype, device="meta")
        meta = TensorMeta(full.shape, full.stride(), full.dtype)
        _specs[key] = spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return spec


make_dtensor = cast(
    Callable[[torch.Tensor, ShardingSpec], DTensor],
    partial(DTensor.__new__, DTensor, requires_grad=False),
)
"""Return the DTensor of a local tensor and a spec: no copy, no check, no autograd node.

``from_local`` takes 22 us on a CPU with 2.13, this function 4 (``DTensor.__new__``).
"""


def make_parameter(local: torch.Tensor, spec: ShardingSpec) -> nn.Parameter:
    """Return the DTensor of a local tensor and a spec as a parameter that needs no gradient.

    ``nn.Parameter`` calls ``detach``, which ``DTensor`` dispatches: 12 us on a CPU with 2.13, this
    function 4 (``_is_param``).
    """
    param: Any = make_dtensor(local, spec)
    param._is_param = True
    return cast(nn.Parameter, param)


def spec_of(tensor: DTensor) -> ShardingSpec:
    """Return the spec of ``tensor`` (``_spec``)."""
    return tensor._spec


def specs_of(tensors: Iterable[object]) -> list[ShardingSpec | None]:
    """Return the spec of each DTensor, and None for other objects (``_spec``).

    A single call handles all tensors: a call per tensor takes longer than reading the spec.
    """
    return list(map(getattr, tensors, repeat("_spec"), repeat(None)))


def set_spec(tensor: torch.Tensor, spec: ShardingSpec) -> None:
    """Give a DTensor a spec that is equal to its own (``_spec``).

    ``nn.Parameter`` uses the first equal spec that torch ever met. The mesh of that spec may have
    a process group that was destroyed.
    """
    cast(DTensor, tensor)._spec = spec


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor, outside autograd (``_local_tensor``).

    ``to_local()`` records a node and waits.
    """
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # cast() costs as much
    return local


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``: a local shard, or a plain tensor itself."""
    return local_shard(tensor) if isinstance(tensor, DTensor) else tensor


def local_shard_getter(attribute: str) -> Callable[[object], torch.Tensor]:
    """Return a function without a Python frame: ``local_shard()`` of an object's attribute."""
    return attrgetter(f"{attribute}._local_tensor")


def local_shards(tensors: Iterable[object]) -> list[torch.Tensor | None]:
    """Return the local shard of each DTensor, and None for other objects; see ``specs_of``."""
    return list(map(getattr, tensors, repeat("_local_tensor"), repeat(None)))


without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context in which torch never calls ``__torch_function__``.

Otherwise each read of an attribute of a ``Parameter`` or ``DTensor`` takes twice as long.
"""

_grad_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


def gradients_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter."""
    with without_torch_function():
        return list(map(_grad_of, params))


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that no other living storage has, or 0 without a storage (``_cdata``)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # a wrapper subclass, or sparse
        return 0


def strided_shard(dim: int, parts: int) -> Placement:
    """Return ``Shard(dim)`` on a mesh axis that cuts each of ``parts`` existing parts.

    DTensor applies placements from the first mesh axis to the last, but tensor parallelism, the
    last axis, cut first (``_StridedShard``).
    """
    constructor = cast(Callable[..., Placement], _StridedShard)
    return constructor(dim, split_factor=parts)


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return the mesh of the axes of ``meshes``, in this order, without new process groups.

    Slicing is public, but needs the mesh that the axes come from (``DeviceMesh._concatenate``).

    Raises:
        RuntimeError: if the axes are not different axes of one mesh.
        ValueError: if an axis has no name.
    """
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise ValueError("an axis has no name")
    concatenate: Any = DeviceMesh._concatenate
    return cast(DeviceMesh, concatenate(meshes))


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` once a functional collective has filled it (``AsyncCollectiveTensor``)."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def set_local_shard(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Replace the local shard of a DTensor by a tensor of equal shape and dtype."""
    cast(DTensor, tensor)._local_tensor = local


current_graph_task = torch._C._current_graph_task_id
"""Return the id of the backward on this thread, or -1: it tells a recomputation from a forward."""


def node_made_since(tensor: torch.Tensor, sequence: int) -> torch.autograd.graph.Node | None:
    """Return the autograd node of the base of ``tensor``, if a forward made that node.

    A change in place gives a view a new node, and keeps the node of its base. Therefore a hook for
    a view must also be on its base (``_is_view``, ``_base``, ``_sequence_nr``).

    Args:
        tensor: an output of the forward.
        sequence: the number of the first node that the forward made.
    """
    if not tensor._is_view() or tensor._base is None:
        return None
    node = tensor._base.grad_fn
    return node if node is not None and node._sequence_nr() >= sequence else None


sequence_of: Callable[[torch.autograd.graph.Node], int] = methodcaller("_sequence_nr")
"""Return the number of a node; later nodes have higher numbers (``_sequence_nr``)."""

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return the number of changes in place of a tensor and its views (``_version``)."""

swap_impl: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
"""Exchange the C++ tensors of two objects; ``swap_tensors`` refuses tensors of a graph."""

FREED = 1_000_000_000
"""The version of a parameter whose memory is freed. See [Note: reads].

[Note: reads] Autograd saves an alias of a parameter and its version, and compares versions when
backward reads the alias. A backward can enter a module through a tensor that the module did not
return. Then no hook gathers the group: the memory of its parameters is freed, or holds another
group. So a freed parameter has this version, and torch raises "modified by an inplace operation ...
is at version 1000000000". Views of a parameter share its version. A gather restores it.
"""

set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter
"""Set the version of each tensor; no public name does (``_unsafe_set_version_counter``)."""


def retire_aliases(params: Sequence[torch.Tensor]) -> None:
    """Make autograd refuse each alias of ``params`` saved so far: they move to other memory."""
    set_versions(tuple(params), tuple([each._version + 1 for each in params]))


functorch_is_active = torch._C._are_functorch_transforms_active
"""Return whether a transform of ``torch.func`` runs."""


def without_functorch() -> AbstractContextManager[None]:
    """Return a context without transforms, which wrap new plain tensors (``_DisableFuncTorch``)."""
    return cast(AbstractContextManager[None], torch._C._DisableFuncTorch())


def in_transform() -> bool:
    """Return whether a transform or a level of forward-mode AD runs (``_current_level``)."""
    return functorch_is_active() or forward_ad._current_level >= 0


is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
"""Return whether ``torch.autograd.functional`` vectorises a tensor."""

will_execute: Callable[[torch.autograd.graph.Node], bool] = torch._C._will_engine_execute_node
"""Return whether the backward that calls this reaches a node (``_will_engine_execute_node``)."""


def add_tensor_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Do what ``tensor.register_hook(hook)`` does, before other hooks and without a handle.

    This function takes 1.3 us on a CPU with 2.13, ``register_hook`` 4.3. A leaf may be frozen now.
    Handles count up from 0, so the hook as a key differs from all handles (``_backward_hooks``,
    ``_register_hook_dict``).
    """
    if not (tensor.is_leaf or type(tensor) is torch.Tensor):  # the subclass may handle hooks
        tensor.register_hook(hook)
        return
    with without_torch_function():
        hooks: Any = tensor._backward_hooks
        if hooks is None:
            tensor._backward_hooks = hooks = OrderedDict()
            if tensor.grad_fn is not None:
                tensor.grad_fn._register_hook_dict(tensor)
    others = dict(hooks)  # autograd reads the dict below an OrderedDict, not its order
    hooks.clear()
    hooks[hook] = hook
    hooks.update(others)


hooks_on_gradient: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")
"""Return the hooks that were registered with ``register_hook`` (``_backward_hooks``)."""

forget_hooks = methodcaller("__setattr__", "_backward_hooks", None)
"""Clear the hooks of a tensor that ``register_hook`` registered (``_backward_hooks``)."""
hooks_after_accumulation: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""Return the hooks of ``register_post_accumulate_grad_hook`` (``_post_accumulate_grad_hooks``)."""


def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return one flat tensor with copies of all elements of ``tensors``, in order.

    ``torch.cat`` needs flat views, which take longer than the copy (``flatten_dense_tensors``).
    """
    flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return flat


def registered_node(value: object) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return items and builder of a container in torch's pytree, or None (``SUPPORTED_NODES``)."""
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda items: node.unflatten_fn(items, context)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a 1-D mesh over all ranks of ``mesh``, whose axis is called ``name``.

    torch makes it once per root mesh and name (``_flatten``).

    Raises:
        ValueError: if the root mesh has another axis of that name.
    """
    return mesh._flatten(name)


def empty_data(param: nn.Parameter) -> None:
    """Release the memory of ``param``, which has no element afterwards.

    Setting ``.data`` of a ``DTensor`` keeps its local tensor (``_local_tensor``). Other wrapper
    subclasses may refuse, and keep their memory.
    """
    if isinstance(param, DTensor):
        param._local_tensor = param._local_tensor.new_empty(0)
    elif type(param.data) is torch.Tensor:
        param.data = param.data.new_empty(0)


_F = TypeVar("_F", bound=Callable[..., Any])


def mark_sharded(module: nn.Module) -> None:
    """Make both ``replicate`` functions of torch skip ``module``.

    These functions look for ``fully_shard`` in a table on the module. Its key differs in each
    process (``_composable.contract``, which imports nothing of torch's FSDP).
    """
    applied = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
    applied.setdefault("fully_shard", RegistryItem())


def not_pickled(hook: _F) -> _F:
    """Return ``hook`` itself, which pickling leaves out, and which causes no warning."""
    return cast(_F, unserializable_hook(hook))


def untraced(marked: _F) -> _F:
    """Return ``marked`` itself, which the compiler no longer traces, nor the functions it calls.

    The wrapper of ``torch.compiler.disable`` costs time at each call, and imports the compiler.
    Here the code object is marked for frames that the compiler intercepts
    (``set_code_exec_strategy``), and the function for inlined calls (``_torchdynamo_disable``).

    Args:
        marked: a function in Python, or a class, whose public methods are marked.
    """
    public = [each for name, each in vars(marked).items() if not name.startswith("_")]
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    for each in public if isinstance(marked, type) else [marked]:
        if isinstance(each, FunctionType):
            frames.set_code_exec_strategy(each.__code__, frames._FrameExecStrategy(skip, skip))
            vars(each).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=None)
    return marked
