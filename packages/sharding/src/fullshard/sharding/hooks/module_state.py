"""What ``fully_shard`` attaches to a module: the hooks that lease its groups.

Owns the order of things at pre-forward, post-forward, pre-backward and post-backward. It refuses
to free, gather or reduce by itself: it takes and returns leases, and says which module's turn it
is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch import nn

from fullshard.comm import EventKind, emit, is_profiled, named_range
from fullshard.sharding.base.checks import require_bool
from fullshard.sharding.base.compat import current_graph_task, in_transform, untraced
from fullshard.sharding.base.leases import LeaseKind
from fullshard.sharding.base.tensors import map_tensors
from fullshard.sharding.hooks.call import Call, has_raised
from fullshard.sharding.hooks.context import Order
from fullshard.sharding.hooks.module_home import ModuleHome, ModulePolicies
from fullshard.sharding.hooks.transforms import (
    outside_transforms,
    refuse_tracing,
    watch_inputs,
    watch_outputs,
)
from fullshard.sharding.hooks.use import Use, attach_post_backward, attach_pre_backward
from fullshard.sharding.params.touch import explain_touch

if TYPE_CHECKING:
    from fullshard.sharding.groups.param_group import FSDPParamGroup

__all__ = ["ModuleState", "state_of", "the_state", "the_states"]

_ATTRIBUTE = "_fullshard_state"
_P = ParamSpec("_P")
_R = TypeVar("_R")


class ModuleState:
    """The state of one ``fully_shard`` call.

    Attributes:
        modules: the module, or the modules given as a list.
        own_groups: the group of its parameters; none if it has no parameters of its own.
        groups: those, and the groups that own a parameter tied into its modules.
        name: the full name of its first module from the root.
        forward_prefetch: what the user set to be gathered ahead in forward; replaces the policy.
        backward_prefetch: the same for backward.
        forward_position: its place in the forward in progress.
        host_ns: nanoseconds spent in its hooks so far.
        unshard_in_backward: whether backward needs full parameters.
        hidden: places in the post-forward order that forwards without gradients took.
        pre_backward: what the first gradient of an output calls, with its use; gradients that
            autograd hands a hook may follow, and are ignored.
        post_backward: what backward calls when it reached the inputs; the same.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: Iterable[FSDPParamGroup],
        borrowed: Iterable[FSDPParamGroup],
        home: ModuleHome,
        policies: ModulePolicies,
    ) -> None:
        """Starts as its own root until a forward finds the real one."""
        self.modules = modules
        self.own_groups = list(groups)
        self.groups = list(dict.fromkeys([*self.own_groups, *borrowed]))
        self.mesh_info = home.mesh_info
        self.device = home.device
        self.casts = policies.casts
        self.reshard = policies.reshard
        self.prefetch = policies.prefetch
        self.name = ""
        self.is_root = False
        self.initialised = False
        self.context = home.context
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        self.forward_position = -1
        self.host_ns = 0
        self.unshard_in_backward = True
        self.pre_backward: Callable[..., None] = self._pre_backward
        self.post_backward: Callable[..., None] = self._post_backward
        self._calls: list[Call] = []
        self._to_run: set[nn.Module] = set()
        self._pass_use: weakref.ref[Use] | None = None  # see [Note: use]
        self.hidden: list[int] = []
        self._on_first_use: Callable[[ModuleState], None] = _nobody

    def attach(self, on_first_use: Callable[[ModuleState], None]) -> None:
        """Puts the state and its hooks on its modules; ``on_first_use`` will make it the root."""
        self._on_first_use = on_first_use
        for module in self.modules:
            module.__dict__[_ATTRIBUTE] = self
            module.register_forward_pre_hook(
                self._timed(self.pre_forward, "pre_forward"), prepend=True, with_kwargs=True
            )
            # always_call: non-reentrant checkpointing ends a recomputation by an exception
            module.register_forward_hook(
                self._timed(self.post_forward, "post_forward"), always_call=True
            )
        self.pre_backward = self._timed(self._pre_backward, "pre_backward")
        self.post_backward = self._timed(self._post_backward, "post_backward")

    def _timed(self, hook: Callable[_P, _R], label: str) -> Callable[_P, _R]:
        """Returns ``hook``, timed in ``host_ns``, profiled as ``label``, traced by no compiler."""

        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            start = perf_counter_ns()
            try:
                if is_profiled():
                    with named_range(label, self.name):
                        return hook(*args, **kwargs)
                return hook(*args, **kwargs)
            finally:
                self.host_ns += perf_counter_ns() - start

        return untraced(timed)

    def ensure_initialised(self) -> None:
        """Makes this module the root, unless it has been given one."""
        if not self.initialised:
            self._on_first_use(self)

    # -- forward ----------------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Unshards the groups; returns the inputs, cast and passed through a post-backward node."""
        if not in_transform():
            return self._begin_call(module, args, kwargs)
        refuse_tracing(self.label)
        outside_transforms(self._begin_call)(module, (), {})
        call = self._calls[-1]
        call.in_transform = True
        args, kwargs = self._prepare_inputs(args, kwargs)
        if call.use is not None:
            args, kwargs = watch_inputs(call.use, args, kwargs)
        return args, kwargs

    def _begin_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.ensure_initialised()
        call = Call(recompute=current_graph_task() != -1, leased=[])
        if not call.recompute:
            self.context.enter_forward(self)  # may reset all calls in progress, so ours comes after
            call.entered = True
        elif not self.context.turns.free:
            self.context.enter_backward()
        self._calls.append(call)
        emit(EventKind.PRE_FORWARD, self.label, rank=self._rank)
        args, kwargs = self._prepare_inputs(args, kwargs)
        first = self._begin_pass(module)
        for group in self.groups:
            if not call.recompute:
                group.refresh()
            group.claim(LeaseKind.FORWARD)
            call.leased.append(group)
            self.context.turns.gather(group)
            group.unshard()
        for group in self.groups:
            group.wait_for_unshard()
        if first and not call.recompute:
            self._prefetch_in_forward()
        if not torch.is_grad_enabled():
            return args, kwargs
        call.use = self._use_of_pass(first, call)
        args, kwargs, call.passed = attach_post_backward(call.use, args, kwargs)
        return args, kwargs

    def _prepare_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.is_root and self.device.type != "cpu":
            args, kwargs = map_tensors(
                lambda t: t.to(self.device, non_blocking=True), (args, kwargs)
            )
        return self.casts.cast_inputs(args, kwargs)

    def _begin_pass(self, module: nn.Module) -> bool:
        """Tells whether ``module`` is the first of its list to run in this pass over the list."""
        if module in self._to_run:
            self._to_run.discard(module)
            return False
        self._to_run = set(self.modules) - {module}
        return True

    def _use_of_pass(self, first: bool, call: Call) -> Use:
        """Returns the use that all modules of the list share in one pass."""
        shared = None if first or self._pass_use is None else self._pass_use()
        use = Use(self, recompute=call.recompute) if shared is None or shared.done else shared
        self._pass_use = weakref.ref(use)
        return use

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Returns the output, cast and watched for its gradient; ends the FORWARD leases.

        ``output`` is None when forward raised.
        """
        if output is None:
            explain_touch(sys.exception())
        if not self._calls:
            return output  # a pre-hook that ran before ours raised
        call = self._calls.pop()
        if call.in_transform:
            if call.use is not None:
                output = watch_outputs(call.use, output)
            outside_transforms(self._end_call)(call, output, needs_grad=call.use is not None)
        else:
            tensors = call.watched(output)
            if call.use is not None and tensors:
                attach_pre_backward(call.use, tensors)
            self._end_call(call, output, needs_grad=bool(tensors))
        return self.casts.cast_output(output)

    def _end_call(self, call: Call, output: Any, *, needs_grad: bool) -> None:
        self._record_order(call, needs_grad=needs_grad)
        emit(EventKind.POST_FORWARD, self.label, rank=self._rank)
        for group in call.leased:
            self._return_forward(group, call, needs_grad=needs_grad, raised=output is None)
        if call.entered:
            self.context.leave_forward(raised=has_raised(output))

    def _record_order(self, call: Call, *, needs_grad: bool) -> None:
        """Gives the use its place in the post-forward order.

        Reentrant checkpointing runs the forward without gradients and reruns it in backward with
        them: the rerun takes the place that the hidden forward had.
        """
        if not self.groups:
            return  # nothing to gather, so it has no place in the order
        if call.recompute:
            if call.use is not None and needs_grad and self.hidden:
                call.use.position = self.hidden.pop()
        elif not self._to_run:
            position = self.context.post_forward.append(self)
            if call.use is not None and needs_grad:
                call.use.position = position
            else:
                self.hidden.append(position)

    def _return_forward(
        self, group: FSDPParamGroup, call: Call, *, needs_grad: bool, raised: bool
    ) -> None:
        leases, turns = group.leases, self.context.turns
        keep = not self.reshard.after_forward(self.is_root)
        if call.recompute:
            if needs_grad:
                leases.take(LeaseKind.RECOMPUTE)
        elif keep and turns.free:
            if needs_grad and call.use is not None:
                group.hold_for_graph(call.use.number)
            elif not raised:
                group.keep()
        elif keep or turns.holds(group) or self._to_run:
            leases.hold(LeaseKind.PREFETCH)  # for who has yet to run in this forward
        group.give_back(LeaseKind.FORWARD)

    def _prefetch_in_forward(self) -> None:
        targets = self.forward_prefetch
        if not targets:
            order, position = self.context.last_forward, self.forward_position
            if 0 <= position < len(order.names) and order.names[position] == self.name:
                targets = self._targets(order, self.prefetch.in_forward(order.names, position))
        for target in targets:
            for group in target.groups:
                group.refresh()
                self.context.turns.prefetch(group)

    def _targets(self, order: Order, positions: Iterable[int]) -> list[ModuleState]:
        return [order.at(position, self.name) for position in positions]

    # -- backward ---------------------------------------------------------------------------------

    @outside_transforms
    def _pre_backward(self, use: Use, *_: object) -> None:
        """Unshards the groups for the backward of ``use``; only the first of its outputs does."""
        if use.in_backward:
            return
        self.context.enter_backward()
        if use.done:  # a retained graph runs once more
            use.rerun()
        use.in_backward = True
        emit(EventKind.PRE_BACKWARD, self.label, rank=self._rank)
        for group in use.groups:
            group.begin_backward(use)
            if self.unshard_in_backward:
                self.context.turns.gather(group)
                group.unshard()
        for group in use.groups:
            group.wait_for_unshard()
        self._prefetch_in_backward(use)

    def _prefetch_in_backward(self, use: Use) -> None:
        targets = self.backward_prefetch
        order = self.context.post_forward
        if not targets and 0 <= use.position < len(order.names):
            targets = self._targets(order, self.prefetch.in_backward(order.names, use.position))
        for target in targets:
            for group in target.groups if target.unshard_in_backward else ():
                self.context.turns.prefetch(group)

    @outside_transforms
    def _post_backward(self, use: Use, *_: object) -> None:
        """Ends the backward of ``use`` once it reached the inputs of all modules of its pass."""
        use.reached += 1
        if use.reached < use.calls or use.done:
            return
        use.close()
        turns = self.context.turns
        keep = turns.free and not self.reshard.after_backward(self.is_root)
        for group in use.groups:
            if group.end_use(use, keep=keep, reduce=turns.free):
                turns.reduce(group)

    # -- access -----------------------------------------------------------------------------------

    @outside_transforms
    def unshard(self, *, async_op: bool) -> None:
        """Gathers its groups for a user."""
        for group in self.own_groups:
            group.unshard_by_hand(async_op=async_op)
        if not async_op:
            self.wait_for_unshard()

    @outside_transforms
    def wait_for_unshard(self) -> None:
        """Waits for the gathers of its groups."""
        for group in self.own_groups:
            group.wait_for_unshard()

    @outside_transforms
    def reshard_now(self) -> None:
        """Returns the user's lease, and what a graph, a prefetch or a kept copy holds."""
        for group in self.own_groups:
            group.reshard()

    def parameters_changed(self) -> None:
        """Declares copies of the parameters that its modules hold stale."""
        for group in self.groups:
            group.generation.advance()

    def forget_order(self) -> None:
        """Forgets its places in a post-forward order that was dropped."""
        self.hidden.clear()

    def reset(self) -> None:
        """Forgets the calls in progress."""
        self.forget_order()
        self._calls.clear()
        self._to_run.clear()
        self._pass_use = None

    @property
    def label(self) -> str:
        """Its name for people: the root's is empty."""
        return self.name or "(root)"

    @property
    def _rank(self) -> int:
        return self.mesh_info.shard_rank


def _nobody(state: ModuleState) -> None:
    raise AssertionError(f"{state.name} was used before it was attached")


def the_state(module: object) -> ModuleState:
    """Returns the state of a sharded module."""
    state = state_of(cast(nn.Module, module))
    assert state is not None, "fully_shard puts a state on each module whose class it changes"
    return state


def the_states(module: object, recurse: bool) -> list[ModuleState]:
    """Returns the states of a sharded module and, with ``recurse``, of all below it, each once."""
    require_bool("recurse", recurse)
    modules = cast(nn.Module, module).modules() if recurse else [cast(nn.Module, module)]
    found = (state_of(each) for each in modules)
    return list(dict.fromkeys(state for state in found if state is not None))


def state_of(module: nn.Module) -> ModuleState | None:
    """Returns the state that ``fully_shard`` put on ``module``, or None."""
    state: ModuleState | None = module.__dict__.get(_ATTRIBUTE)
    return state
