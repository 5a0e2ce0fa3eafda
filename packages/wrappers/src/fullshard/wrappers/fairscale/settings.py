"""The arguments of FairScale's constructor, checked, and the call of ``fully_shard`` they become.

Owns both. Arguments of later releases than those that scripts spell by position are fields here
with the defaults that FairScale gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist

from fullshard.policies import CPUOffloadPolicy, MixedPrecisionPolicy
from fullshard.wrappers.fsdp1.mesh import Ranks, ranks_of
from fullshard.wrappers.fsdp1.settings import ShardingStrategy

__all__ = ["FairScaleSettings", "ProcessGroupName"]

_FLAGS = (
    "reshard_after_forward",
    "mixed_precision",
    "fp32_reduce_scatter",
    "flatten_parameters",
    "cpu_offload",
    "move_params_to_cpu",
    "disable_reshard_on_root",
    "no_broadcast_optim_state",
    "clear_autocast_cache",
    "force_input_to_fp32",
    "verbose",
    "state_dict_on_rank_0_only",
    "limit_all_gather_events",
    "limit_reduce_scatter_events",
    "should_validate_process_group",
    "allow_reset_parameters",
)


class ProcessGroupName(StrEnum):
    """Which process group FairScale reduces over, by name; here both are ``process_group``."""

    default = "default"
    reduce_scatter = "reduce_scatter"


@dataclass(frozen=True, kw_only=True)
class FairScaleSettings:
    """The arguments of a constructor, except the module.

    Attributes:
        process_group: the ranks that shard; None: all.
        reshard_after_forward: free full parameters after forward.
        mixed_precision: compute in ``compute_dtype``, over full-precision shards.
        fp32_reduce_scatter: reduce gradients in float32; needs ``mixed_precision``.
        flatten_parameters: either value; there is no flat parameter.
        cpu_offload: the earlier name of ``move_params_to_cpu``.
        compute_dtype: None: float16 with ``mixed_precision``, and float32 otherwise. Without
            ``mixed_precision`` the parameters must have it already.
        move_grads_to_cpu: shards and gradients live on the CPU; None: as ``move_params_to_cpu``.
        bucket_cap_mb: accepted, without effect: what a wrapper holds is reduced in one launch.
        move_params_to_cpu: shards and gradients live on the CPU.
        disable_reshard_on_root: keep the root's parameters until its backward.
        buffer_dtype: dtype of floating-point buffers; None: ``compute_dtype``.
        compute_device: where to compute; None: what the process group drives.
        process_group_reduce_scatter: the ranks that reduce: a ``ProcessGroupName``, or a group of
            the ranks of ``process_group``; reductions use it, while gathers use ``process_group``.
        no_broadcast_optim_state: False only.
        state_dict_device: where ``state_dict()`` puts tensors; None: where the model computes.
        clear_autocast_cache: forget what autocast cast, after each forward.
        force_input_to_fp32: cast inputs to float32, without ``mixed_precision``.
        verbose: show more in ``repr``.
        state_dict_on_rank_0_only: ``state_dict()`` is empty on other ranks.
        gradient_predivide_factor: any; the division is split where float16 needs it.
        limit_all_gather_events: either value; memory is bounded always.
        limit_reduce_scatter_events: either value; memory is bounded always.
        should_validate_process_group: either value; nothing is sent to validate one.
        allow_reset_parameters: let ``reset_parameters()`` through to the module.
    """

    process_group: dist.ProcessGroup | None = None
    reshard_after_forward: bool = True
    mixed_precision: bool = False
    fp32_reduce_scatter: bool = False
    flatten_parameters: bool = True
    cpu_offload: bool = False
    compute_dtype: torch.dtype | None = None
    move_grads_to_cpu: bool | None = None
    bucket_cap_mb: float = 25
    move_params_to_cpu: bool = False
    disable_reshard_on_root: bool = True
    buffer_dtype: torch.dtype | None = None
    compute_device: torch.device | None = None
    process_group_reduce_scatter: Any = ProcessGroupName.reduce_scatter
    no_broadcast_optim_state: bool = False
    state_dict_device: torch.device | None = None
    clear_autocast_cache: bool = False
    force_input_to_fp32: bool = False
    verbose: bool = False
    state_dict_on_rank_0_only: bool = False
    gradient_predivide_factor: float | None = None
    limit_all_gather_events: bool = False
    limit_reduce_scatter_events: bool = False
    should_validate_process_group: bool = True
    allow_reset_parameters: bool = False

    def __post_init__(self) -> None:
        """Check the arguments, and fill in those that follow from others.

        Raises:
            TypeError: if one is of the wrong type.
            ValueError: if two contradict each other.
        """
        self._check_types()
        if self.fp32_reduce_scatter and not self.mixed_precision:
            raise ValueError("fp32_reduce_scatter=True requires mixed_precision=True")
        if self.no_broadcast_optim_state:
            raise ValueError(
                "no_broadcast_optim_state=True is for parameters that are not sharded; leave them "
                "out of the wrapper: ignored_params of fully_shard"
            )
        self._check_reducing_group()
        default = torch.float16 if self.mixed_precision else torch.float32
        offloaded = self.cpu_offload or self.move_params_to_cpu
        self._fill(compute_dtype=default, move_grads_to_cpu=offloaded, move_params_to_cpu=offloaded)
        self._fill(buffer_dtype=self.compute_dtype)
        if offloaded and not self.move_grads_to_cpu:
            raise ValueError(
                "move_grads_to_cpu=False with parameters on the CPU would leave a gradient on the "
                "device without its parameter; leave it out"
            )

    def _check_reducing_group(self) -> None:
        given = self.process_group_reduce_scatter
        if isinstance(given, str) and given in {each.value for each in ProcessGroupName}:
            return
        if given is None or given is self.process_group:
            return
        if not isinstance(given, dist.ProcessGroup):
            raise TypeError(
                f"process_group_reduce_scatter is {given!r}; pass a ProcessGroupName or a process "
                "group"
            )
        own = self.process_group or dist.group.WORLD
        if dist.get_process_group_ranks(given) != dist.get_process_group_ranks(own):
            raise ValueError(
                f"process_group_reduce_scatter has ranks {dist.get_process_group_ranks(given)}, "
                f"and process_group has {dist.get_process_group_ranks(own)}; pass one of the same "
                "ranks, or leave it out"
            )

    def _check_types(self) -> None:
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; pass True or False")
        if not isinstance(self.move_grads_to_cpu, bool | None):
            raise TypeError(
                f"move_grads_to_cpu is {self.move_grads_to_cpu!r}; pass True, False or None"
            )
        for name in ("compute_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise TypeError(f"{name} is {dtype!r}; pass a floating-point torch.dtype or None")
        for name in ("bucket_cap_mb", "gradient_predivide_factor"):
            number = getattr(self, name)
            if number is not None and (
                isinstance(number, bool) or not isinstance(number, (int, float))
            ):
                raise TypeError(f"{name} is {number!r}; pass a number")

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            if getattr(self, name) is None or name == "move_params_to_cpu":
                object.__setattr__(self, name, value)

    def require_dtypes(self, params: Mapping[str, torch.Tensor]) -> None:
        """Return if ``params`` are computed in ``compute_dtype``.

        Raises:
            ValueError: naming one that is not.
        """
        if self.mixed_precision or self.compute_dtype is torch.float32:
            return
        for name, param in params.items():
            if param.dtype != self.compute_dtype:
                raise ValueError(
                    f"compute_dtype is {self.compute_dtype} without mixed_precision=True, and "
                    f"{name} is {param.dtype}; pass mixed_precision=True, or cast the module first"
                )

    def ranks(self) -> Ranks:
        """Return where to communicate.

        Raises:
            RuntimeError: if ``torch.distributed`` was not initialised.
            TypeError: if ``process_group`` is none.
        """
        return ranks_of(self.process_group, None, ShardingStrategy.FULL_SHARD, self.compute_device)

    def call(self, ranks: Ranks) -> dict[str, Any]:
        """Return the arguments of ``fully_shard`` that these become; defaults are left out."""
        arguments: dict[str, Any] = {}
        if ranks.mesh is not None:
            arguments["mesh"] = ranks.mesh
        if not (self.reshard_after_forward and self.disable_reshard_on_root):
            arguments["reshard_after_forward"] = self.reshard_after_forward
        if self.mixed_precision:
            arguments["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=self.compute_dtype,
                reduce_dtype=torch.float32 if self.fp32_reduce_scatter else None,
            )
        elif self.force_input_to_fp32:
            arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32)
        if self.move_grads_to_cpu:
            arguments["offload_policy"] = CPUOffloadPolicy()
        return arguments

    @property
    def shown(self) -> dict[str, Any]:
        """The arguments that ``repr`` of a module shows."""
        names = [
            "reshard_after_forward",
            "compute_dtype",
            "buffer_dtype",
            "fp32_reduce_scatter",
            "bucket_cap_mb",
        ]
        if self.verbose:
            names = [each.name for each in fields(self) if each.name != "process_group"]
        return {name: getattr(self, name) for name in names}
