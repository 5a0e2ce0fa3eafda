"""torch's private names, and nothing else: the one file of this package that may use them.

Each function says why the private name is needed, and names it; each was seen on torch 2.11, 2.13
and 2.15. The rest of the package is written against these functions, so a change in torch is a
change in this file.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import repeat
from operator import attrgetter, methodcaller
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.autograd import forward_ad, graph
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = [
    "ShardingSpec",
    "add_tensor_hook",
    "allow_reads",
    "concatenated_mesh",
    "count_of_process_groups",
    "current_graph_task",
    "empty_data",
    "finished",
    "flatten",
    "flatten_mesh",
    "forbid_reads",
    "functorch_is_active",
    "gradients_of",
    "hooks_after_accumulation",
    "in_compiled_autograd",
    "in_transform",
    "is_legacy_batched",
    "local_shard",
    "local_shard_getter",
    "local_shards",
    "make_dtensor",
    "make_spec",
    "mark_sharded",
    "may_hook_saved_tensors",
    "node_made_since",
    "queue_end_of_backward",
    "readable_version",
    "registered_node",
    "retire_aliases",
    "runs_split_backward",
    "sequence_of",
    "set_local_shard",
    "set_spec",
    "spec_of",
    "specs_of",
    "storage_of",
    "strided_shard",
    "untraced",
    "version_of",
    "without_functorch",
    "without_torch_function",
]

ShardingSpec = DTensorSpec
"""Mesh, placements, global shape and dtype of a DTensor (``DTensorSpec``)."""

_specs: WeakValueDictionary[tuple[object, ...], ShardingSpec] = WeakValueDictionary()


def make_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], like: torch.Tensor
) -> ShardingSpec:
    """Returns the spec of a DTensor whose full tensor has the shape and dtype of ``like``.

    ``DTensor.from_local`` would build it anew, with an autograd node, at each call; a gradient is
    made at every step, so it is made once for all that are alike (``_dtensor_spec``).
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
"""Returns the DTensor of a local tensor under a spec: no copy, no check, no autograd node.

The constructor is not public. ``from_local`` took 22 us where it took 4, on a CPU with 2.13, of
which ``__new__`` does everything (``DTensor.__new__``).
"""


def spec_of(tensor: DTensor) -> ShardingSpec:
    """Returns the spec of ``tensor`` (``_spec``)."""
    return tensor._spec


def specs_of(tensors: Iterable[object]) -> list[ShardingSpec | None]:
    """Returns the spec of each DTensor, and None for what is none.

    A call per tensor takes longer than reading its spec, at each step of an optimizer
    (``_spec``).
    """
    return list(map(getattr, tensors, repeat("_spec"), repeat(None)))


def set_spec(tensor: torch.Tensor, spec: ShardingSpec) -> None:
    """Gives a DTensor a spec that is equal to its own.

    ``nn.Parameter`` gives it the first equal one that torch ever met, which it keeps: its mesh may
    be another object, over a process group that was destroyed since (``_spec``).
    """
    cast(DTensor, tensor)._spec = spec


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a DTensor, outside autograd.

    ``to_local()`` records a node and waits; the engine reads a shard at each gather
    (``_local_tensor``).
    """
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # cast() costs as much
    return local


def local_shard_getter(attribute: str) -> Callable[[object], torch.Tensor]:
    """Returns what returns ``local_shard()`` of an object's ``attribute``, without a frame."""
    return attrgetter(f"{attribute}._local_tensor")


def local_shards(tensors: Iterable[object]) -> list[torch.Tensor | None]:
    """Returns this rank's shard of each DTensor, outside autograd, and None for what is none.

    As ``specs_of``, for all parameters and gradients at each step (``_local_tensor``).
    """
    return list(map(getattr, tensors, repeat("_local_tensor"), repeat(None)))


def without_torch_function() -> AbstractContextManager[None]:
    """Returns a context in which torch asks no tensor for ``__torch_function__``.

    It does at each reading of an attribute of a ``Parameter`` or ``DTensor``, which takes half of
    the time (``DisableTorchFunctionSubclass``).
    """
    return torch._C.DisableTorchFunctionSubclass()


def gradients_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns the gradient of each parameter."""
    with without_torch_function():
        return [param.grad for param in params]


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number that no other living storage has; 0 if there is none to see (``_cdata``)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # a wrapper subclass, or sparse
        return 0


def strided_shard(dim: int, parts: int) -> Placement:
    """Returns ``Shard(dim)`` on a mesh axis that cuts each of ``parts`` parts, cut before it.

    Placements are read from the first mesh axis to the last, and tensor parallelism, the last axis,
    cut first (``_StridedShard``).
    """
    constructor = cast(Callable[..., Placement], _StridedShard)
    return constructor(dim, split_factor=parts)


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Returns the mesh of the axes of ``meshes``, in this order; makes no process group.

    Slicing by names is public, but only from the mesh that the axes were sliced from, which nobody
    hands us (``DeviceMesh._concatenate``).

    Raises:
        RuntimeError: if they are not different axes of one mesh.
        ValueError: if an axis has no name.
    """
    if any(mesh.mesh_dim_names is None for mesh in meshes):
        raise ValueError("an axis has no name")
    concatenate: Any = DeviceMesh._concatenate
    return cast(DeviceMesh, concatenate(meshes))


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` itself, waited for if a functional collective is to fill it.

    What ``redistribute`` returns may be on its way (``AsyncCollectiveTensor``).
    """
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def set_local_shard(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Makes ``local``, of the same shape and dtype, this rank's shard of a DTensor.

    A DTensor cannot be given another shard in public (``_local_tensor``).
    """
    cast(DTensor, tensor)._local_tensor = local


def count_of_process_groups() -> int:
    """Returns how many process groups this rank is in.

    torch names one that not all ranks make after it (``_world.pg_names``).
    """
    return len(dist.distributed_c10d._world.pg_names)


current_graph_task = torch._C._current_graph_task_id
"""Returns the id of the backward that this thread is inside of, or -1.

There is no public way to ask whether a forward is a recomputation inside a backward
(``torch._C._current_graph_task_id``).
"""


def node_made_since(tensor: torch.Tensor, sequence: int) -> torch.autograd.graph.Node | None:
    """Returns the autograd node of the tensor that ``tensor`` is a view of, if it is young enough.

    Args:
        tensor: an output of a forward.
        sequence: the number of the first node that the forward made.

    A change in place of a view gives the view a new node and leaves its base's, so what watches a
    view must watch its base (``_is_view``, ``_base``, ``_sequence_nr``).
    """
    if not tensor._is_view() or tensor._base is None:
        return None
    node = tensor._base.grad_fn
    return node if node is not None and node._sequence_nr() >= sequence else None


sequence_of: Callable[[torch.autograd.graph.Node], int] = methodcaller("_sequence_nr")
"""Returns the number of a node, higher than of those made before."""


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Returns how often a tensor, or a view of its memory, was changed in place (``_version``)."""


_FREED = 1_000_000_000
"""Added to the version of a parameter while its memory is freed. See [Note: reads]."""


def forbid_reads(params: Sequence[torch.Tensor]) -> None:
    """Make autograd refuse to read ``params``, or a view of them, in a backward.

    [Note: reads] Autograd saves an alias of a parameter and its version, and compares versions
    when backward reads the alias. A backward can enter a module through a tensor that the module
    did not return. Then no hook gathers the group, and the memory of its parameters is freed, or
    holds another group. So the version of a freed parameter is higher by ``_FREED``, and torch
    raises "modified by an inplace operation ... is at version 1000000000". Views of a parameter
    share its version. A gather restores the version (``_unsafe_set_version_counter``).
    """
    _set_versions(params, [each._version % _FREED + _FREED for each in params])


def allow_reads(params: Sequence[torch.Tensor]) -> None:
    """Let autograd read ``params`` again: their memory holds the values that it saved."""
    _set_versions(params, [each._version % _FREED for each in params])


def retire_aliases(params: Sequence[torch.Tensor]) -> None:
    """Make autograd refuse each alias of ``params`` saved so far: they move to other memory."""
    _set_versions(params, [each._version + 1 for each in params])


def readable_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, whether or not its memory is freed now."""
    return tensor._version % _FREED


def may_hook_saved_tensors(own: type) -> bool:
    """Return whether hooks on saved tensors may be pushed now.

    Only the hooks pushed last see a tensor. So hooks of checkpointing or of a user stay on top,
    unless they are methods of ``own``. Transforms of ``torch.func`` refuse hooks
    (``_saved_tensors_hooks_is_enabled``, ``_top_saved_tensors_default_hooks``).
    """
    autograd = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    top = autograd._top_saved_tensors_default_hooks(False)
    return top is None or isinstance(getattr(top[0], "__self__", None), own)


def _set_versions(params: Sequence[torch.Tensor], versions: list[int]) -> None:
    torch._C._autograd._unsafe_set_version_counter(tuple(params), tuple(versions))


def runs_split_backward() -> bool:
    """Return whether a pipeline stage of torch runs the part of a backward that is the inputs'.

    Autograd calls hooks on the thread that called it, or on one of its own, which has no caller
    (``pipelining._backward.stage_backward_input``; ``autograd.graph._engine_run_backward``).
    """
    stages = sys.modules.get("torch.distributed.pipelining._backward")
    if stages is None:
        return False
    split, run = stages.stage_backward_input.__code__, graph._engine_run_backward.__code__
    codes = _codes_above(sys._getframe())
    if run not in codes:
        codes = {each for frame in sys._current_frames().values() for each in _codes_above(frame)}
    return split in codes


def _codes_above(frame: FrameType | None) -> set[CodeType]:
    """Return the code of ``frame`` and of all its callers."""
    found = set()
    while frame is not None:
        found.add(frame.f_code)
        frame = frame.f_back
    return found


functorch_is_active = torch._C._are_functorch_transforms_active
"""Tells whether a transform of ``torch.func`` runs."""


def without_functorch() -> AbstractContextManager[None]:
    """Returns a context in which none does: where one does, also new plain tensors are wrapped.

    (``_DisableFuncTorch``).
    """
    return cast(AbstractContextManager[None], torch._C._DisableFuncTorch())


def in_transform() -> bool:
    """Tells whether one does, or a level of forward-mode AD (``_current_level``: the same)."""
    return functorch_is_active() or forward_ad._current_level >= 0


def is_legacy_batched(tensor: torch.Tensor) -> bool:
    """Tells whether ``torch.autograd.functional`` vectorises ``tensor``."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def add_tensor_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Does what ``tensor.register_hook(hook)`` does, and makes no handle to remove it by.

    With the handle and what is around it, it takes 4.3 us on a CPU with 2.13, without them 1.3.
    A parameter may be frozen now: the hook runs once it requires a gradient.
    Handles count up from 0, so the hook itself is a key that no other hook has
    (``_backward_hooks``, ``_register_hook_dict``).
    """
    if type(tensor) not in (torch.Tensor, nn.Parameter):  # a subclass may have a say
        tensor.register_hook(hook)
        return
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        tensor._backward_hooks = hooks = OrderedDict()
        if tensor.grad_fn is not None:
            tensor.grad_fn._register_hook_dict(tensor)
    hooks[hook] = hook


def in_compiled_autograd() -> bool:
    """Tells whether compiled autograd captured the present backward (its own flag)."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")  # not imported: it is not in use
    return bool(getattr(module, "in_compiled_autograd_region", False))


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the present backward ends without an error.

    DDP and every sharded data parallel engine depend on it; it has no public name
    (``_execution_engine.queue_callback``).
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


hooks_after_accumulation: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""Returns what the user registered with ``register_post_accumulate_grad_hook``, if anything.

Autograd does not call them: a sharded gradient is assigned (``_post_accumulate_grad_hooks``).
"""


def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns a copy of all elements of ``tensors``, one tensor after another.

    ``torch.cat`` wants them flat, and to make a view of each takes longer than the copy on a
    CPU (``flatten_dense_tensors``).
    """
    flat: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return flat


def registered_node(value: object) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Returns what is in a container registered with torch's pytree, and how to make one like it.

    Libraries register their containers there, for ``torch.export`` and others; which ones are, has
    no public name (``torch.utils._pytree.SUPPORTED_NODES``).
    """
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    return list(children), lambda items: node.unflatten_fn(items, context)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Returns a 1-D mesh over all ranks of ``mesh``, whose axis is called ``name``.

    Made once per root mesh and name, with its process groups. There is no public way from several
    axes to one process group (``_flatten``).

    Raises:
        ValueError: if the root mesh has another axis of that name.
    """
    return mesh._flatten(name)


def empty_data(param: nn.Parameter) -> None:
    """Makes ``param`` let go of its memory: it has no element from now on.

    Assigning ``.data`` of a ``DTensor`` changes its shape but not what it holds; other tensors that
    hold tensors may refuse it, and keep theirs (``_local_tensor``).
    """
    if isinstance(param, DTensor):
        param._local_tensor = param._local_tensor.new_empty(0)
    elif type(param.data) is torch.Tensor:
        param.data = param.data.new_empty(0)


_F = TypeVar("_F", bound=Callable[..., Any])


def mark_sharded(module: nn.Module) -> None:
    """Makes torch's composable functions, either ``replicate``, leave ``module`` to us.

    They look for the name ``fully_shard`` in a table on the module, under a key that is another in
    each process, and which no public name gives. To import it loads nothing of torch's FSDP
    (``_composable.contract``).
    """
    applied = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
    applied.setdefault("fully_shard", RegistryItem())


def untraced(function: _F) -> _F:
    """Returns ``function``, which the compiler runs as it is, and all that it calls.

    ``torch.compiler.disable`` says the same by a wrapper, which is slower at each call, and imports
    the compiler where nobody compiles. Instead the code object is marked, for frames that the
    compiler would intercept (``set_code_exec_strategy``), and the function, for those that it would
    inline (``_torchdynamo_disable``).
    """
    assert isinstance(function, FunctionType), "a function in Python has code to mark"
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=None)
    return function
