"""The state of one ``FullyShardedDataParallel``.

Owns the one object that the class keeps, so that attributes of the wrapped module are not hidden by
ours, and what all instances under a root share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fullshard.sharding import FSDPModule, FSDPParamGroup
from fullshard.sharding.spi import groups_of
from fullshard.wrappers.fsdp1.arguments import Fsdp1Arguments, ShardingCall
from fullshard.wrappers.fsdp1.forward_order import ForwardOrder
from fullshard.wrappers.fsdp1.mesh import Ranks
from fullshard.wrappers.fsdp1.settings import ShardingStrategy
from fullshard.wrappers.fsdp1.state_dicts.types import StateDictSettings, StateDictType, settings_of
from fullshard.wrappers.ignored_states import Ignored, managed_modules

__all__ = ["Instance", "Root"]

_ATTRIBUTE = "_fullshard_fsdp1"


@dataclass(frozen=True, kw_only=True)
class Root:
    """State that the instances under one root share.

    Attributes:
        instance: the root's.
        order: the order of their forwards; None where it is not to be compared.
        groups: the groups that do not keep full parameters from forward to backward.
    """

    instance: Instance
    order: ForwardOrder | None
    groups: Sequence[FSDPParamGroup]

    def show_sharded(self) -> None:
        """Make modules hold sharded parameters, with the gradients of earlier backwards.

        Full parameters of the root stay in memory, since its backward needs them. Other full
        parameters are freed: the user may change the sharded ones now.
        """
        for group in self.groups:
            group.show_sharded()

    @classmethod
    def of(
        cls, root: Instance, instances: Sequence[Instance], names: Mapping[nn.Parameter, str]
    ) -> Root:
        """Return what ``instances`` share.

        Forward orders are compared where torch was asked for all that it can check.

        Args:
            root: the outermost of them.
            instances: all, in an order that ranks share.
            names: the full name of each parameter.
        """
        shown = [each.sharded for each in instances if not each.arguments.strategy.keeps_parameters]
        groups = [group for module in shown for group in groups_of(module)]
        if dist.get_debug_level() != dist.DebugLevel.DETAIL:
            return cls(instance=root, order=None, groups=groups)
        owned = [
            [names[param] for param in {param: None for _, param in each.own_parameters()}]
            for each in instances
        ]
        return cls(instance=root, order=ForwardOrder(owned, root.ranks), groups=groups)


@dataclass(kw_only=True, eq=False)
class Instance:
    """The state of one wrapper.

    Attributes:
        arguments: what its constructor was given.
        ranks: over which ranks.
        ignored: what is left alone.
        call: the call of ``fully_shard`` or ``replicate`` that the arguments became.
        sharded: the module that the call received.
        state_dict_settings: the last settings of ``set_state_dict_type``.
        buffer_dtypes: the own dtypes of the buffers that mixed precision casts, by name.
        root: what it shares with others, from the first forward on.
        number: its place among the instances of the root.
        has_hook: whether a communication hook was registered.
        synchronises: whether backward reduces gradients.
        summoned: whether it has full parameters by ``summon_full_params``.
    """

    arguments: Fsdp1Arguments
    ranks: Ranks
    ignored: Ignored
    call: ShardingCall
    sharded: FSDPModule
    state_dict_settings: StateDictSettings = field(
        default_factory=lambda: settings_of(StateDictType.FULL_STATE_DICT)
    )
    buffer_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    root: Root | None = None
    number: int = 0
    has_hook: bool = False
    synchronises: bool = True
    summoned: bool = False

    def __post_init__(self) -> None:
        """Store the instance on the module, for a later wrapper."""
        self.module.__dict__[_ATTRIBUTE] = self

    @classmethod
    def of(
        cls, module: nn.Module, arguments: Fsdp1Arguments, call: ShardingCall
    ) -> Instance | None:
        """Return the instance that sharded ``module``, or None.

        Raises:
            ValueError: if ``module`` was wrapped with other arguments.
        """
        found: Instance | None = module.__dict__.get(_ATTRIBUTE)
        if found is None:
            return None
        if (found.call, found.arguments.precision) != (call, arguments.precision):
            raise ValueError(
                f"{type(found.module).__name__} was wrapped before, as {found.call}, and is now to "
                f"be wrapped as {call}; give both wrappers the same arguments, or keep the first"
            )
        return found

    @property
    def module(self) -> nn.Module:
        """The module that was given to ``fully_shard``."""
        return cast(nn.Module, self.sharded)

    @property
    def is_root(self) -> bool:
        """Whether it is the outermost instance, as far as is known."""
        return self.root is not None and self.root.instance is self

    @property
    def shards(self) -> bool:
        """Return whether ranks hold parts of the instance's parameters, not all of them."""
        strategy = self.arguments.strategy
        return strategy is not ShardingStrategy.NO_SHARD and self.ranks.process_group.size() > 1

    @property
    def exact(self) -> bool:
        """Whether forward uses its parameters in the dtype in which they are stored."""
        dtype = self.arguments.precision.param_dtype
        return dtype is None or all(
            param.dtype == dtype for _, param in self.own_parameters() if param.is_floating_point()
        )

    def own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of its group by name: not those ignored or in other instances."""
        return managed_modules(self.module, self.ignored.modules)

    def own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of its group by name, tied ones more than once."""
        for prefix, module in self.own_modules():
            for name, param in module.named_parameters(recurse=False):
                if param not in self.ignored.params:
                    yield f"{prefix}.{name}" if prefix else name, param

    def convert_parameters(self, to: torch.dtype | torch.device, **options: bool) -> None:
        """Cast or move the parameters of its group in place, with the options of ``Tensor.to``."""
        own = {id(param) for _, param in self.own_parameters()}

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            return cast(Any, tensor).to(to, **options) if id(tensor) in own else tensor

        self.module._apply(convert)

    def cast_buffers(self) -> None:
        """Cast the floating-point buffers to the dtypes of mixed precision; once."""
        dtype = self.arguments.precision.buffer_dtype
        for prefix, module in self.own_modules() if dtype is not None else ():
            for name, buffer in module.named_buffers(recurse=False):
                full_name = f"{prefix}.{name}" if prefix else name
                if buffer.is_floating_point() and full_name not in self.buffer_dtypes:
                    self.buffer_dtypes[full_name] = buffer.dtype
                    module._buffers[name] = buffer.to(dtype)

    def synchronise(self, synchronises: bool) -> None:
        """Turn the reduction of gradients on or off.

        Off, a strategy that keeps parameters until backward keeps them after it as well.
        """
        self.synchronises = synchronises
        self.sharded.set_requires_gradient_sync(synchronises, recurse=False)
        if self.arguments.strategy.keeps_parameters:
            self.sharded.set_reshard_after_backward(synchronises, recurse=False)

    def check_takes_hook(self) -> None:
        """Return if a communication hook may be registered.

        Raises:
            ValueError: with a hybrid strategy.
            RuntimeError: if one was registered before.
        """
        if self.arguments.strategy.is_hybrid:
            raise ValueError(
                f"{self.arguments.strategy.name} reduces in two ways, for which one communication "
                "hook cannot stand; use set_custom_reduce_scatter() of the sharded modules"
            )
        if self.has_hook:
            raise RuntimeError("a communication hook was registered before; register one, once")

    def keep_low_precision_grads(self) -> None:
        """Leave gradients in the dtype in which they were reduced."""
        precision = self.arguments.precision
        dtype = precision.low_precision
        if not precision.keep_low_precision_grads or dtype is None:
            return

        def lower(param: torch.Tensor) -> None:
            if param.grad is not None and param.grad.dtype != dtype:
                param.grad = param.grad.to(dtype)

        for param in {param: None for _, param in self.own_parameters()}:
            param.grad_dtype = None  # any
            param.register_post_accumulate_grad_hook(lower)
