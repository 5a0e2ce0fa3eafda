"""FairScale's ``FullyShardedDataParallel``, on ``fully_shard``.

Owns the constructor and the methods. The class adds no engine: the arguments become a call of
``fully_shard``, and each method one of ``fullshard.sharding``'s. There is no flat parameter:
modules keep their own parameters, for any ``flatten_parameters``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint import (
    full_optim_state_dict,
    shard_full_optim_state_dict,
)
from fullshard.sharding import (
    FSDPModule,
    fully_shard,
    unsharded,
)
from fullshard.wrappers.fairscale.buffers import cast_buffers
from fullshard.wrappers.fairscale.local_state_dicts import consolidated, local_metadata
from fullshard.wrappers.fairscale.optim_state_ids import with_names
from fullshard.wrappers.fairscale.own_parameters import (
    names_in_order,
    own_parameters,
    own_parameters_below,
)
from fullshard.wrappers.fairscale.pickled import Shards, put_together, take_apart
from fullshard.wrappers.fairscale.settings import FairScaleSettings, ProcessGroupName
from fullshard.wrappers.fairscale.state_dicts import attach_state_dict_hooks
from fullshard.wrappers.fsdp1.mesh import Ranks
from fullshard.wrappers.fsdp1.state_dicts.parts import PART
from fullshard.wrappers.ignored_states import WRAPPED
from fullshard.wrappers.wrapper import Wrapper, require_unwrapped

__all__ = ["FullyShardedDataParallel", "get_fsdp_instances"]


class FullyShardedDataParallel(Wrapper):
    """A module whose parameters are sharded, in FairScale's wrapper.

    Attributes:
        settings: what it was given; each of them is an attribute of the wrapper, too, but
            ``flatten_parameters``, which is False.
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
        process_group_reduce_scatter: Any = ProcessGroupName.reduce_scatter,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: float = 25,
        compute_device: torch.device | None = None,
        no_broadcast_optim_state: bool = False,
        state_dict_device: torch.device | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
        **others: Any,
    ) -> None:
        """Wrap ``module``; nothing is sent.

        Args:
            module: the module; it is changed in place and held. Wrap inner modules first.
            process_group: this and all others: see ``FairScaleSettings``.
            **others: what other releases have, by keyword.

        Raises:
            RuntimeError: if ``torch.distributed`` was not initialised.
            TypeError: if an argument is unknown or of the wrong type.
            ValueError: if arguments contradict each other, or the module cannot be sharded.
        """
        named = FairScaleSettings.__dataclass_fields__
        given = {name: value for name, value in locals().items() if name in named}
        super().__init__()
        settings = FairScaleSettings(**given, **others)
        self._wrap(module, settings)
        self.buffer_dtypes: dict[str, torch.dtype] = {}
        if mixed_precision or settings.compute_dtype is not torch.float32:
            assert settings.buffer_dtype is not None, "it was filled in"
            self.buffer_dtypes = cast_buffers(module, settings.buffer_dtype)

    def _wrap(self, module: nn.Module, settings: FairScaleSettings) -> None:
        require_unwrapped(module, FullyShardedDataParallel)
        settings.require_dtypes(dict(module.named_parameters()))
        self.settings = settings
        self.is_local = False
        self._ranks: Ranks = settings.ranks()
        self.call = settings.call(self._ranks)
        self._fsdp_wrapped_module = fully_shard(module, **self.call)
        attach_state_dict_hooks(self)

    # -- the wrapped module -----------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def _sharded(self) -> FSDPModule:
        return cast(FSDPModule, self._fsdp_wrapped_module)

    def __getattr__(self, name: str) -> Any:
        """Return a setting, or an attribute of the wrapped module, where the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or WRAPPED not in self._modules:
                raise
        if name in FairScaleSettings.__dataclass_fields__:
            return getattr(self.settings, name)
        return getattr(self._fsdp_wrapped_module, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under the names of the unwrapped model."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield name.replace(PART, ""), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers under the names of the unwrapped model."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(PART, ""), buffer

    def _below(self) -> list[FullyShardedDataParallel]:
        """Return the wrappers under this one, itself included."""
        return get_fsdp_instances(self)

    @property
    def flatten_parameters(self) -> bool:
        """False: whatever was given, parameters are not flattened, and ``module`` is the module."""
        return False

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that are in no wrapper below, each once."""
        return list(dict.fromkeys(own_parameters(self).values()))

    def non_shared_params(self) -> list[nn.Parameter]:
        """Return ``params``: no parameter is appended to a second wrapper."""
        return self.params

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that shard."""
        return self._ranks.process_group

    @property
    def mesh_code(self) -> str:
        """How its mesh is made of ``process_group``, as Python; empty for all ranks."""
        return self._ranks.code

    def extra_repr(self) -> str:
        """Show rank, world size and settings; all of them if ``verbose``."""
        shown = {"rank": self.rank, "world_size": self.world_size, **self.settings.shown}
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    # -- training ---------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the wrapped module's forward returns."""
        output = self._fsdp_wrapped_module(*args, **kwargs)
        if self.settings.clear_autocast_cache:
            torch.clear_autocast_cache()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication inside a ``with`` block.

        For this wrapper and those below. The first backward after it reduces the sum. Full
        gradients are kept until then.
        """
        self._sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded.set_requires_gradient_sync(True)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide summed gradients by ``pre * post`` instead of the number of ranks.

        Args:
            pre: FairScale divides by it before the reduction.
            post: and by this after it; here the division is split where float16 needs it.
            recursive: also those of wrappers below.
        """
        for each in self._below() if recursive else [self]:
            each._sharded.set_gradient_divide_factor(pre * post)

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient."""
        return [param for param in self.parameters() if param.grad is not None]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, also of parameters that are unsharded now."""
        super().zero_grad(set_to_none)
        self.module.zero_grad(set_to_none)

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Give the modules full parameters inside a ``with`` block; every rank enters it.

        Args:
            recurse: also those of wrappers below.
            volatile: drop what was changed; else it is written into the shards at the end.

        Raises:
            RuntimeError: in the middle of a forward or backward.
        """
        with unsharded(self.module, writeback=not volatile, recurse=recurse):
            yield

    def apply(self, fn: Callable[[nn.Module], Any]) -> FullyShardedDataParallel:
        """Call ``fn`` with each module, children first, while its wrapper has full parameters.

        Changes by ``fn`` are kept. Every rank calls it.
        """
        with self.summon_full_params(recurse=False):
            nn.Module.apply(self, fn)
        return self

    def reset_parameters(self) -> None:
        """Call ``reset_parameters()`` of the wrapped module, while it has full parameters.

        Raises:
            RuntimeError: unless ``allow_reset_parameters=True`` was given.
        """
        if not self.settings.allow_reset_parameters:
            raise RuntimeError(
                "reset_parameters() of a wrapped module needs allow_reset_parameters=True"
            )
        with self.summon_full_params():
            cast(Any, self.module).reset_parameters()

    # -- state dicts ------------------------------------------------------------------------------

    def local_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return this rank's shards, as plain tensors under clean names; nothing is sent.

        Takes the arguments of ``state_dict()``, which gives whole tensors.
        """
        with self._local():
            found: dict[str, Any] = self.state_dict(*args, **kwargs)
            return found

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load what ``local_state_dict()`` gave on this rank, of as many; nothing is sent.

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

    def local_metadata_dict(self) -> dict[str, Any]:
        """Return metadata of the local state dict, for ``consolidate_shard_weights``."""
        buffers = [name for name, _ in self.named_buffers()]
        return local_metadata(own_parameters_below(self), buffers)

    consolidate_shard_weights = staticmethod(consolidated)

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
        self, optim: torch.optim.Optimizer, recipient_rank: int | None = 0, **ignored: Any
    ) -> dict[str, Any] | None:
        """Return the whole state of ``optim`` by names, on rank 0; None elsewhere.

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
        """Return this rank's part of a full state dict, for ``optim.load_state_dict``.

        State dicts that FairScale saved are accepted too: it numbers parameters in an order of its
            own.

        Args:
            full_optim_state_dict: whole tensors, by name, or by number in the order of
                ``parameters()``, in which groups must hold them.

        Raises:
            ValueError: if model and state dict do not have the same parameters.
        """
        named = with_names(full_optim_state_dict, names_in_order(self))
        return shard_full_optim_state_dict(named, self)

    # -- pickling ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return what this rank holds, for pickling and copying; nothing is sent.

        Raises:
            TypeError: if the process group is not the default one, or a parameter is tied to one of
                another wrapper.
        """
        if self.settings.process_group not in (None, dist.group.WORLD):
            raise TypeError(
                "a module on a process group of its own cannot be pickled; save local_state_dict() "
                "instead"
            )
        groups = ("process_group", "process_group_reduce_scatter")  # all ranks again
        given = vars(self.settings)
        return {
            "settings": {name: value for name, value in given.items() if name not in groups},
            "shards": take_apart(self.module, FullyShardedDataParallel),
            "training": self.training,
            "buffer_dtypes": self.buffer_dtypes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Wrap again from ``__getstate__``'s result; needs ``torch.distributed``."""
        shards: Shards = state["shards"]
        super().__init__()
        self._wrap(shards.module, FairScaleSettings(**state["settings"]))
        put_together(shards)
        self.training = state["training"]
        self.buffer_dtypes = state["buffer_dtypes"]


def get_fsdp_instances(mod: nn.Module, skip_empty: bool = False) -> list[FullyShardedDataParallel]:
    """Return the wrappers under ``mod``, itself included, outer ones first.

    Args:
        mod: any module.
        skip_empty: leave out those whose parameters are all in wrappers below.
    """
    found = [each for each in mod.modules() if isinstance(each, FullyShardedDataParallel)]
    return [each for each in found if each.params] if skip_empty else found
