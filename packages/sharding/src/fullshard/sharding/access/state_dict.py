"""State dicts of a sharded model: sharded, full, and loading both.

Owns the hooks that make ``state_dict()`` see sharded parameters and ``load_state_dict()`` accept
full tensors, and two functions for full state dicts. The formats, and the collectives behind a
full state dict, are ``torch.distributed.checkpoint``'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.overrides import is_tensor_like

from fullshard.sharding.base.compat import (
    local_of,
    local_shard,
    make_dtensor,
    make_parameter,
    spec_of,
    storage_of,
    untraced,
)
from fullshard.sharding.base.states import ShardedState
from fullshard.sharding.base.tensors import map_tensors
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.params.lookup import owner_of
from fullshard.sharding.params.lost_data import require_own_data
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.registry import registry_of

__all__ = [
    "attach_state_dict_hooks",
    "full_state_dict",
    "load_full_state_dict",
    "require_between_steps",
]


def attach_state_dict_hooks(group: FSDPParamGroup, modules: Iterable[nn.Module]) -> None:
    """Make state dicts of ``modules`` hold and take the sharded parameters of ``group``."""
    reference = weakref.ref(group)

    @untraced
    def before_save(module: nn.Module, *args: Any) -> None:
        if (owner := reference()) is not None:
            if owner.generation.data_was_set:
                require_own_data(owner.params)
            _reshard(owner, "state_dict()")

    positions: dict[nn.Module, dict[str, int]] = {module: {} for module in modules}
    for position, param in enumerate(group.params):
        for place in param.places:
            if place.module in positions:
                positions[place.module][place.name] = position
    for module, own in positions.items():
        module.register_state_dict_pre_hook(before_save)
        _attach_load_hooks(module, own, reference)


def _attach_load_hooks(
    module: nn.Module, own: dict[str, int], reference: weakref.ref[FSDPParamGroup]
) -> None:
    """Make ``load_state_dict()`` of ``module`` fill its shards.

    torch calls the hooks for each module, and a group may have hundreds. Therefore a hook looks
    only at the parameters of its module, and the group adopts parameters that the load replaced:
    ``assign=True`` registers other objects, ``torch.utils.swap_tensors`` takes their attributes.

    Args:
        module: holds parameters of the group.
        own: their names in the module, and their positions in the group.
        reference: the group. Copies of the module share the hooks, and must not keep it alive.
    """
    original = weakref.ref(module)

    @untraced
    def before_load(
        called: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *args: Any,
    ) -> None:
        group = reference()
        if group is None or called is not original():
            return
        _reshard(group, "load_state_dict()")
        assigns = metadata.get("assign_to_params_buffers", False)
        for name, position in own.items():
            given = state_dict.get(prefix + name)
            if given is None:
                continue
            if not isinstance(given, DTensor):
                state_dict[prefix + name] = given = _cut(group.params[position], given)
            if assigns and type(given) is DTensor and not isinstance(given, nn.Parameter):
                state_dict[prefix + name] = _to_assign(group.params[position], given)

    @untraced
    def after_load(called: nn.Module, incompatible: Any) -> None:
        group = reference()
        if group is None or called is not original():
            return
        held, params = registry_of(called), group.params
        replaced = [
            param
            for name, position in own.items()
            if (found := held.get(name)) is not (param := params[position]).sharded
            or owner_of(found) is not param
        ]
        if replaced:
            group.adopt_registered(replaced)
        group.generation.advance()

    module.register_load_state_dict_pre_hook(before_load)
    module.register_load_state_dict_post_hook(after_load)


def _reshard(group: FSDPParamGroup, call: str) -> None:
    """Reshard ``group`` if anything holds it; torch asks once for each module.

    Raises:
        RuntimeError: if a forward or backward uses it.
    """
    if group.leases.out or group.gathering.state is not ShardedState.SHARDED:
        require_between_steps(group, call)
        group.reshard()


def require_between_steps(group: FSDPParamGroup, call: str) -> None:
    """Return if no forward or backward uses ``group``; end a backward that raised.

    Raises:
        RuntimeError: if one does, saying so of ``call``.
    """
    if group.leases.in_use:
        for root in group.live_roots:
            root.end_raised_backward()
    if group.leases.in_use:
        raise RuntimeError(
            f"{call} was called while parameter group {group.name!r} is in the middle of its "
            "forward or backward; call it between steps"
        )


def _cut(param: FSDPParam, given: Any) -> Any:
    """Return this rank's shard of a full tensor: a full state dict loads without communication.

    Return anything else as it is, and leave a wrong shape for ``load_state_dict`` to report.
    """
    # a tensor that is read from a file when it is used is only like a tensor
    if not is_tensor_like(given) or given.shape != param.shape:
        return given
    local = param.shard_of(torch.detach(given)).to(param.shard.device, param.shard.dtype)
    return make_dtensor(local, param.spec)


def _to_assign(param: FSDPParam, given: DTensor) -> torch.Tensor:
    """Return ``given`` as the parameter that ``assign=True`` registers, if it is sharded alike.

    The parameter shares the memory of ``given``. torch makes an equal one by a dispatched call.
    """
    if spec_of(given) != param.spec:
        return given
    return make_parameter(torch.detach(local_shard(given)), param.spec)


def _check_shapes_of_rank0(module: nn.Module, state_dict: dict[str, Any]) -> None:
    """Return if rank 0's tensors have the model's shapes; raise on every rank alike.

    torch copies shard onto shard, where a wrong shape may broadcast without a word.
    """
    told = [{key: value.shape for key, value in state_dict.items() if hasattr(value, "shape")}]
    dist.broadcast_object_list(told, src=0)
    own = module.state_dict()
    wrong = [
        f"size mismatch for {key}: {tuple(shape)} came, the model has {tuple(own[key].shape)}"
        for key, shape in told[0].items()
        if key in own and own[key].shape != shape
    ]
    if wrong:
        raise RuntimeError("; ".join(wrong))


@untraced
def full_state_dict(
    module: nn.Module, *, cpu_offload: bool = True, rank0_only: bool = True
) -> dict[str, Any]:
    """Return the full, unsharded state dict of ``module``; call it on every rank.

    All tensors are copies, which training does not change: buffers and parameters that are not
    sharded, too.

    Args:
        module: the root of a sharded model.
        cpu_offload: put each full tensor on the CPU as soon as it is gathered.
        rank0_only: return an empty dict on other ranks; needs ``cpu_offload``.

    Raises:
        ValueError: if ``rank0_only`` is asked for without ``cpu_offload``.
    """
    if rank0_only and not cpu_offload:
        raise ValueError("rank0_only=True needs cpu_offload=True; pass rank0_only=False")
    full = get_model_state_dict(
        module,
        options=StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload and rank0_only),
    )
    tensors = [*module.parameters(), *module.buffers()]
    own = {storage_of(local_of(t)) for t in tensors} | {0}

    def apart(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.cpu() if cpu_offload else tensor
        return moved.clone() if storage_of(moved) in own else moved

    copied: dict[str, Any] = map_tensors(apart, full)
    return copied


@untraced
def load_full_state_dict(
    module: nn.Module, state_dict: dict[str, Any], *, broadcast_from_rank0: bool = False
) -> None:
    """Load a full state dict into a sharded model; call it on every rank.

    Args:
        module: the root of a sharded model.
        state_dict: full tensors; with ``broadcast_from_rank0`` only rank 0's is read.
        broadcast_from_rank0: send rank 0's tensors to all ranks.

    Raises:
        RuntimeError: if keys or shapes do not match the model, with the message of
            ``load_state_dict``.
    """
    if not broadcast_from_rank0:
        module.load_state_dict(state_dict)
        return
    _check_shapes_of_rank0(module, state_dict)
    set_model_state_dict(
        module,
        # torch replaces the entries, and broadcasts memory in the order of a contiguous tensor
        map_tensors(torch.Tensor.contiguous, dict(state_dict)),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
