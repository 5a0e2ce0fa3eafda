"""``FullyShardedDataParallel``, the wrapper class of PyTorch's FSDP1, on ``fully_shard``.

Owns the constructor and the methods. The class has no engine: the arguments become a call of
``fully_shard``, and each method one of ``fullshard.sharding``'s. There is no flat parameter:
modules keep their original parameters for any ``use_orig_params``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding.spi import StandIns, tensors_in
from fullshard.wrappers.fsdp1.arguments import Fsdp1Arguments, ShardingCall
from fullshard.wrappers.fsdp1.auto_wrap import AutoWrap
from fullshard.wrappers.fsdp1.given import Given
from fullshard.wrappers.fsdp1.initial_values import materialise, synchronise
from fullshard.wrappers.fsdp1.instance import Instance, Root
from fullshard.wrappers.fsdp1.mesh import Ranks, ranks_of
from fullshard.wrappers.fsdp1.own_reduction import reduce_by_hook
from fullshard.wrappers.fsdp1.settings import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
)
from fullshard.wrappers.fsdp1.state_dicts.hooks import attach_state_dict_hooks
from fullshard.wrappers.fsdp1.state_dicts.methods import StateDictMethods
from fullshard.wrappers.fsdp1.state_dicts.optim_methods import OptimStateDicts
from fullshard.wrappers.fsdp1.state_dicts.summon import Summons, summoned
from fullshard.wrappers.ignored_states import WRAPPED, Ignored, read_ignored
from fullshard.wrappers.wrapper import require_module, require_unwrapped

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(StateDictMethods, OptimStateDicts, Given):
    """A module whose parameters are sharded, in the wrapper of PyTorch's FSDP1."""

    def __init__(  # the names, order and defaults are FSDP1's
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup
        | tuple[dist.ProcessGroup, dist.ProcessGroup]
        | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        """Wrap ``module``, and before that what ``auto_wrap_policy`` chooses under it.

        Communicates only for ``sync_module_states`` and to make meshes of process groups.

        Args:
            module: the module; it is changed in place and held. An instance is allowed, which then
                has no more parameters to shard. The module of another instance with the same
                arguments is allowed, too; then both wrappers share one instance.
            process_group: one; a pair (who shards, who holds the same shards) for hybrid
                strategies; None: all ranks, or for hybrid ones the ranks of each node.
            sharding_strategy: None: FULL_SHARD.
            cpu_offload: whether shards live on the CPU.
            auto_wrap_policy: which modules become instances: a policy of
                ``fullshard.wrappers.wrap``, or a function of module, recurse, nonwrapped_numel.
            backward_prefetch: when backward gathers the next parameters; None: on demand.
            mixed_precision: dtypes.
            ignored_modules: modules that stay as they are.
            param_init_fn: gives values to a module on the meta device; None: its own
                ``reset_parameters()``.
            device_id: the device of this process; None: the accelerator that the process group
                drives, or otherwise the CPU.
            sync_module_states: begin with the first rank's values on all ranks.
            forward_prefetch: gather the next parameters in forward, too.
            limit_all_gathers: either value; memory is bounded always.
            use_orig_params: either value; parameters are the original ones always.
            ignored_states: parameters or modules that stay as they are.
            device_mesh: instead of process groups: 1-D; (replicate, shard) for hybrid strategies.

        Raises:
            RuntimeError: if ``torch.distributed`` was not initialised.
            TypeError: if an argument is of the wrong type.
            ValueError: if arguments contradict each other, or the module cannot be sharded.
        """
        given = {name: value for name, value in locals().items() if name in _ARGUMENTS}
        super().__init__()
        arguments = Fsdp1Arguments(**given)
        require_module(module)
        if auto_wrap_policy is not None:
            require_unwrapped(module, FullyShardedDataParallel)
        below = [each.instance.ignored for each in type(self).fsdp_modules(module)]
        ignored = read_ignored(ignored_modules, ignored_states, below)
        ranks = ranks_of(process_group, device_mesh, arguments.strategy, device_id)
        call = arguments.call(ranks, ignored)
        self.instance = Instance.of(module, arguments, call) or self._sharded(
            module, arguments, ranks, ignored, call
        )
        self._fsdp_wrapped_module = module
        attach_state_dict_hooks(self)

    @classmethod
    def _sharded(
        cls,
        module: nn.Module,
        arguments: Fsdp1Arguments,
        ranks: Ranks,
        ignored: Ignored,
        call: ShardingCall,
    ) -> Instance:
        """Shard ``module`` and the modules that the policy chooses, and return its instance."""
        if arguments.auto_wrap_policy is not None:
            AutoWrap(
                policy=arguments.auto_wrap_policy,
                wrapper=cls,
                arguments=arguments.for_children(ranks, ignored),
                ignored=ignored,
            ).run(module)
        materialise(module, ignored, arguments.param_init_fn, ranks.device)
        if arguments.sync_module_states:
            synchronise(module, ignored, ranks)
        instance = Instance(
            arguments=arguments, ranks=ranks, ignored=ignored, call=call, sharded=call(module)
        )
        instance.keep_low_precision_grads()
        return instance

    # -- the wrapped module -----------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module; the innermost, where it is also wrapped for checkpointing."""
        wrapped: nn.Module = self._fsdp_wrapped_module
        inside = wrapped._modules.get("_checkpoint_wrapped_module")
        return wrapped if inside is None else inside

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module, where the wrapper has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if WRAPPED not in self._modules:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the wrapper, and then the modules inside under the names they have unwrapped.

        Therefore the names of parameters and buffers are clean: those of the unwrapped model.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return all instances under ``module``, itself included; or only the outermost.

        Raises:
            TypeError: if ``module`` is no module.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}; pass an nn.Module")
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        if not root_only:
            return found
        inside = {below for each in found for below in each.modules() if below is not each}
        return [each for each in found if each not in inside]

    def apply(self, fn: Callable[[nn.Module], Any]) -> FullyShardedDataParallel:
        """Call ``fn`` with each module, children first, while all have full parameters.

        Changes by ``fn`` are kept. Every rank calls it.
        """
        if self.instance.summoned:
            nn.Module.apply(self, fn)
            return self
        with self.summon_full_params(self):
            nn.Module.apply(self, fn)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, including parameters that are unsharded now."""
        self.instance.sharded.zero_grad(set_to_none)

    # -- forward ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the wrapped module's forward returns.

        Raises:
            RuntimeError: if forward orders are compared (``TORCH_DISTRIBUTED_DEBUG=DETAIL``) and
                ranks differ in the first iteration.
        """
        root = self._root()
        is_root = self.instance.is_root
        dtype = self.mixed_precision.input_dtype(is_root=is_root)
        stand_ins = StandIns()
        inputs = [] if dtype is None else tensors_in((args, kwargs))
        inputs = [tensor for tensor in inputs if tensor.is_floating_point()]
        try:
            stand_ins.put(inputs, [tensor.to(dtype) for tensor in inputs])
            args, kwargs = stand_ins.applied(args, kwargs)
            if root.order is None:
                output = self._fsdp_wrapped_module(*args, **kwargs)
            else:
                with root.order.iteration(training=self.training) if is_root else nullcontext():
                    root.order.visit(self.instance.number)
                    output = self._fsdp_wrapped_module(*args, **kwargs)
        finally:
            stand_ins.take_back()
        if is_root:
            root.show_sharded()
        return stand_ins.returned(output)

    def check_is_root(self) -> bool:
        """Return whether this is the outermost instance; make it so if none has run yet."""
        self._root()
        return self.instance.is_root

    def _root(self) -> Root:
        """Return what it shares with all under its root, which it becomes if it has none."""
        if self.instance.root is None:
            instances = self.fsdp_modules(self)
            names = {param: name for name, param in self.named_parameters()}
            found = [each.instance for each in instances]
            self.instance.root = Root.of(self.instance, found, names)
            for number, each in enumerate(instances):
                each.instance.root, each.instance.number = self.instance.root, number
                each.instance.cast_buffers()
        return self.instance.root

    # -- gradients --------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication inside a ``with`` block.

        For this instance and those below. The first backward after it reduces the sum. Full
        gradients stay in memory until then.
        """
        before = [(each, each.instance.synchronises) for each in self.fsdp_modules(self)]
        for each, _ in before:
            each.instance.synchronise(False)
        try:
            yield
        finally:
            for each, synchronises in before:
                each.instance.synchronise(synchronises)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Make ``hook`` reduce the gradients, of this instance and those below.

        Args:
            state: what it is called with first: for those of ``fullshard.wrappers.comm_hooks``
                their state.
            hook: called with ``state``, a flat gradient ``[world * n]`` and a tensor ``[n]`` to put
                this rank's reduced part into; with NO_SHARD it is called with ``state`` and a flat
                gradient to overwrite with the result. The hook itself divides by the number of
                ranks. Behind the gradients of each part stand marks, positive where any rank has a
                gradient; sums and means keep them so.

        Raises:
            TypeError: if ``hook`` cannot be called.
            ValueError: with a hybrid strategy.
            RuntimeError: if this is not the root, or one was registered before.
        """
        if not callable(hook):
            raise TypeError(f"hook is a {type(hook).__name__}; pass a function")
        if not self.check_is_root():
            raise RuntimeError(
                "register_comm_hook() was called on an instance inside another; call it on the root"
            )
        instances = [each.instance for each in self.fsdp_modules(self)]
        for each in instances:
            each.check_takes_hook()
        for each in instances:
            each.has_hook = True
            reduce_by_hook(each.sharded, hook, state)

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
        """Return the norm of all gradients together, after scaling them to ``max_norm`` at most.

        As the method of ``Wrapper``, but the norm comes in the dtype of the gradients, the widest
        if they differ.
        """
        norm = super().clip_grad_norm_(max_norm, norm_type)
        dtypes = [param.grad.dtype for param in self.parameters() if param.grad is not None]
        return norm.to(reduce(torch.promote_types, dtypes)) if dtypes else norm

    # -- full parameters --------------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Give ``module`` full parameters inside a ``with`` block; every rank enters it.

        The full parameters are plain tensors in their stored dtype, under clean names.

        Args:
            module: an instance, or a module that holds some.
            recurse: also for the instances below; else for its own only.
            writeback: write what was changed into the shards at the end, unless the block raises.
            rank0_only: only the first rank gets them; its changes go to all.
            offload_to_cpu: return copies on the CPU.
            with_grads: full gradients as well, written back as parameters are.

        Raises:
            TypeError: if a flag is not a bool.
            ValueError: if gradients of one rank only are to be written back.
            RuntimeError: in the middle of a forward or backward, or if changes cannot be written
                back.
        """
        instances = FullyShardedDataParallel.fsdp_modules(module)
        if isinstance(module, FullyShardedDataParallel) and not recurse:
            instances = [module]
        summons = Summons(
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
            exact=all(each.instance.exact for each in instances),
        )
        inside = module
        if isinstance(module, FullyShardedDataParallel):
            inside = module.instance.module
        opened = [each.instance for each in instances if not each.instance.summoned]
        with summoned(inside, summons):
            for each in opened:
                each.summoned = True
            try:
                yield
            finally:
                for each in opened:
                    each.summoned = False


_ARGUMENTS = frozenset(Fsdp1Arguments.__dataclass_fields__)
