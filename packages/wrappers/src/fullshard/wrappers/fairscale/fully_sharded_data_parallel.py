"""FairScale's ``FullyShardedDataParallel``, on ``fully_shard``.

Owns the constructor and the methods. It has no engine: the arguments become a call of
``fully_shard``, and each method one of ``fullshard.sharding``'s. There is no flat parameter:
modules keep their own, whatever ``flatten_parameters`` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fullshard.sharding import (
    FSDPModule,
    full_optim_state_dict,
    fully_shard,
    shard_full_optim_state_dict,
    unsharded,
)
from fullshard.wrappers.fairscale.pickled import Shards, put_together, take_apart
from fullshard.wrappers.fairscale.settings import FairScaleSettings
from fullshard.wrappers.fairscale.state_dicts import attach_state_dict_hooks
from fullshard.wrappers.fsdp1_mesh import Ranks
from fullshard.wrappers.ignored_states import WRAPPED
from fullshard.wrappers.state_dict_parts import PART
from fullshard.wrappers.wrapper import Wrapper, require_unwrapped

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(Wrapper):
    """A module whose parameters are sharded, in FairScale's wrapper.

    Attributes:
        settings: what it was given; each of them is an attribute of the wrapper, too.
        is_local: whether state dicts are of this rank's shards, now.
        buffer_dtypes: the own dtypes of buffers that mixed precision casts, by name.
        call: the arguments of ``fully_shard`` that the settings became.
    """

    settings: FairScaleSettings
    call: dict[str, Any]

    def __init__(  # the names, order and defaults are FairScale's
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        reshard_after_forward: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        cpu_offload: bool = False,
        compute_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: float = 25,
        **later: Any,
    ) -> None:
        """Wraps ``module``; nothing is sent.

        Args:
            module: the module; it is changed in place and held. Wrap inner modules first.
            process_group: the ranks that shard; None: all.
            reshard_after_forward: free full parameters after forward, except the outermost's.
            mixed_precision: compute in ``compute_dtype``, over full-precision shards.
            fp32_reduce_scatter: reduce gradients in float32; needs ``mixed_precision``.
            flatten_parameters: either value; parameters are the original ones always.
            cpu_offload: shards and gradients live on the CPU; needs ``mixed_precision``.
            compute_dtype: None: float16 with ``mixed_precision``, else float32.
            move_grads_to_cpu: gradients, and with them the shards, live on the CPU; None: as
                ``cpu_offload``.
            bucket_cap_mb: MiB of gradients of small groups that may be reduced together.
            **later: what later releases added, by keyword: see ``FairScaleSettings``.

        Raises:
            RuntimeError: if ``torch.distributed`` was not initialised.
            TypeError: if an argument is unknown or of the wrong type.
            ValueError: if arguments contradict each other, or the module cannot be sharded.
        """
        super().__init__()
        settings = FairScaleSettings(
            process_group=process_group,
            reshard_after_forward=reshard_after_forward,
            mixed_precision=mixed_precision,
            fp32_reduce_scatter=fp32_reduce_scatter,
            flatten_parameters=flatten_parameters,
            cpu_offload=cpu_offload,
            compute_dtype=compute_dtype,
            move_grads_to_cpu=move_grads_to_cpu,
            bucket_cap_mb=bucket_cap_mb,
            **later,
        )
        self._wrap(module, settings)
        self.buffer_dtypes: dict[str, torch.dtype] = self._cast_buffers()

    def _wrap(self, module: nn.Module, settings: FairScaleSettings) -> None:
        require_unwrapped(module, FullyShardedDataParallel)
        self.settings = settings
        self.is_local = False
        self._ranks: Ranks = settings.ranks()
        self.call = settings.call(self._ranks)
        self._fsdp_wrapped_module = fully_shard(module, **self.call)
        self._sharded.set_reduce_bucket_cap(max(0.0, settings.bucket_cap_mb), recurse=False)
        attach_state_dict_hooks(self)

    def _cast_buffers(self) -> dict[str, torch.dtype]:
        """Casts floating-point buffers as mixed precision says; returns what they were."""
        found: dict[str, torch.dtype] = {}
        dtype = self.settings.buffer_dtype
        inner = {sub for each in self._below() if each is not self for sub in each.modules()}
        for prefix, module in self.module.named_modules() if self.settings.mixed_precision else ():
            for name, buffer in module.named_buffers(recurse=False) if module not in inner else ():
                if buffer.is_floating_point():
                    found[f"{prefix}.{name}" if prefix else name] = buffer.dtype
                    module._buffers[name] = buffer.to(dtype)
        return found

    # -- the wrapped module -----------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def _sharded(self) -> FSDPModule:
        return cast(FSDPModule, self._fsdp_wrapped_module)

    def __getattr__(self, name: str) -> Any:
        """Returns a setting, or an attribute of the wrapped module, where the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or WRAPPED not in self._modules:
                raise
        if name in FairScaleSettings.__dataclass_fields__:
            return getattr(self.settings, name)
        return getattr(self._fsdp_wrapped_module, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters under the names of the unwrapped model."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield name.replace(PART, ""), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the buffers under the names of the unwrapped model."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(PART, ""), buffer

    def _below(self) -> list[FullyShardedDataParallel]:
        """Returns the wrappers under this one, itself included."""
        return [each for each in self.modules() if isinstance(each, FullyShardedDataParallel)]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that shard."""
        return self._ranks.process_group

    @property
    def mesh_code(self) -> str:
        """How its mesh is made of ``process_group``, as Python; empty for all ranks."""
        return self._ranks.code

    def extra_repr(self) -> str:
        """Shows rank, world size and settings; all of them if ``verbose``."""
        shown = {"rank": self.rank, "world_size": self.world_size, **self.settings.shown}
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    # -- training ---------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the wrapped module's forward returns."""
        output = self._fsdp_wrapped_module(*args, **kwargs)
        if self.settings.clear_autocast_cache:
            torch.clear_autocast_cache()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without communication inside a ``with`` block.

        For this wrapper and those below. The first backward after it reduces the sum. Full
        gradients are held meanwhile.
        """
        self._sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters, also of those that are unsharded now."""
        super().zero_grad(set_to_none)
        self.module.zero_grad(set_to_none)

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Gives the modules full parameters inside a ``with`` block; every rank enters it.

        Args:
            recurse: also those of wrappers below.
            volatile: drop what was changed; else it is written into the shards at the end.

        Raises:
            RuntimeError: in the middle of a forward or backward.
        """
        with unsharded(self.module, writeback=not volatile, recurse=recurse):
            yield

    # -- state dicts ------------------------------------------------------------------------------

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Returns this rank's shards, as plain tensors under clean names; nothing is sent.

        Takes the arguments of ``state_dict()``, which gives whole tensors.
        """
        with self._local():
            found: dict[str, Any] = self.state_dict(*args, **kwargs)
            return found

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads what ``local_state_dict()`` gave on this rank, of as many; nothing is sent.

        Args:
            state_dict: this rank's shards.
            strict: keys must match.

        Returns:
            The missing and the unexpected keys.

        Raises:
            RuntimeError: if keys do not match.
            ValueError: if a shard is of another shape.
        """
        with self._local():
            return self.load_state_dict(dict(state_dict), strict)

    @contextmanager
    def _local(self) -> Iterator[None]:
        wrappers = self._below()
        for each in wrappers:
            each.is_local = True
        try:
            yield
        finally:
            for each in wrappers:
                each.is_local = False

    # -- the optimizer's state --------------------------------------------------------------------

    def gather_full_optim_state_dict(
        self, optim: torch.optim.Optimizer, recipient_rank: int | None = 0
    ) -> dict[str, Any] | None:
        """Returns the whole state of ``optim`` by names, on rank 0; None elsewhere.

        Every rank calls it.

        Args:
            optim: the optimizer of this module's parameters.
            recipient_rank: 0, or None for every rank.

        Raises:
            ValueError: if it is another rank.
        """
        if recipient_rank not in (0, None):
            raise ValueError(f"recipient_rank is {recipient_rank}; pass 0, or None for every rank")
        full = full_optim_state_dict(self, optim, rank0_only=recipient_rank == 0)
        return full or None

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: dict[str, Any]) -> Any:
        """Returns this rank's part of a full state dict, for ``optim.load_state_dict``.

        Groups must hold their parameters in the order of ``parameters()``.

        Raises:
            ValueError: if model and state dict do not have the same parameters.
        """
        return shard_full_optim_state_dict(full_optim_state_dict, self)

    # -- pickling ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Returns what this rank holds, for pickling and copying; nothing is sent.

        Raises:
            TypeError: if the process group is not the default one, or a parameter is tied to one of
                another wrapper.
        """
        if self.settings.process_group not in (None, dist.group.WORLD):
            raise TypeError(
                "a module on a process group of its own cannot be pickled; save local_state_dict() "
                "instead"
            )
        groups = {"process_group": None, "process_group_reduce_scatter": None}
        return {
            "settings": {**vars(self.settings), **groups},
            "shards": take_apart(self.module, FullyShardedDataParallel),
            "training": self.training,
            "buffer_dtypes": self.buffer_dtypes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Wraps anew what ``__getstate__`` gave; ``torch.distributed`` must be initialised."""
        shards: Shards = state["shards"]
        super().__init__()
        self._wrap(shards.module, FairScaleSettings(**state["settings"]))
        put_together(shards)
        self.training = state["training"]
        self.buffer_dtypes = state["buffer_dtypes"]
