"""The hooks that ``fully_shard`` attaches to a module, and the leases that they take.

Forward uses module hooks, backward autograd hooks; groups free, gather and reduce.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeAlias

import torch
from torch import nn

from fullshard.comm import EventKind
from fullshard.comm.spi import NOTHING, WATCHERS, emit, is_profiled, named_range
from fullshard.sharding.base.casting import Casts
from fullshard.sharding.base.compat import (
    current_graph_task,
    functorch_is_active,
    in_transform,
    untraced,
)
from fullshard.sharding.base.forward_pass import Call, CallInputs, ForwardPass
from fullshard.sharding.base.policies import Policies
from fullshard.sharding.base.stand_ins import Args, Inputs, Kwargs
from fullshard.sharding.base.states import LeaseKind
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.context import RootContext
from fullshard.sharding.hooks.list_pass import ListPass
from fullshard.sharding.hooks.module_settings import ModuleSettings
from fullshard.sharding.hooks.transforms import (
    outside_transforms,
    refuse_tracing,
    set_apart,
    watch,
)
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo, device_of_mesh
from fullshard.sharding.params.sharded_access_errors import explain_touch

__all__ = ["ATTRIBUTE", "ModuleState"]

ATTRIBUTE = "_fullshard_state"
"""Under which a module has its ``ModuleState``."""

_Given: TypeAlias = CallInputs | None


class ModuleState:
    """The state of one ``fully_shard`` call.

    Attributes:
        modules: the module, or the modules given as a list.
        own_groups: the group of its parameters; none if it has no parameters of its own.
        groups: those, and the groups that own a parameter tied into its modules.
        mesh_info: the mesh over which it is sharded.
        context: what all under its root share; its own until a root is found.
        settings: what policies and the user chose.
        name: the full name of its first module from the root.
        is_root: whether it is the root.
        reshards_after_forward: whether it does, as the root or not.
        casts: how its inputs and outputs are cast.
        host_ns: nanoseconds spent in its hooks so far.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: Iterable[FSDPParamGroup],
        borrowed: Iterable[FSDPParamGroup],
        mesh_info: FSDPMeshInfo,
        context: RootContext,
        policies: Policies,
    ) -> None:
        """Start as its own root until a forward finds the real one."""
        self.modules = modules
        self.own_groups = list(groups)
        self.groups = list(dict.fromkeys([*self.own_groups, *borrowed]))
        self.mesh_info = mesh_info
        self.context = context
        self.settings = ModuleSettings.of(policies)
        self.name = ""
        self.be_root(False)
        self.host_ns = 0
        self._calls: list[Call] = []
        self._pass = ListPass()
        self._initialise: Callable[[ModuleState], None] | None = None  # until it has a root

    def attach(self, initialise: Callable[[ModuleState], None]) -> None:
        """Put the state and its hooks on its modules; ``initialise`` will make it the root."""
        self._initialise = initialise
        for module in self.modules:
            module.__dict__[ATTRIBUTE] = self
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            # always_call: non-reentrant checkpointing ends a recomputation by an exception
            module.register_forward_hook(self.post_forward, always_call=True)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return device_of_mesh(self.mesh_info.mesh)

    @property
    def label(self) -> str:
        """Its name for people: the root's is empty."""
        return self.name or "(root)"

    @property
    def unshard_in_backward(self) -> bool:
        """Whether backward needs full parameters."""
        return self.settings.unshard_in_backward

    def be_root(self, is_root: bool) -> None:
        """Take the role of a root or not, and ask the policy what that means for resharding."""
        self.is_root = is_root
        self.reshards_after_forward = self.settings.after_forward(is_root)
        self.casts = Casts.of(self.settings.casts, self.device if is_root else None)
        for group in self.own_groups:
            group.full_after_backward = not self.settings.after_backward(is_root)

    # -- forward ----------------------------------------------------------------------------------

    @untraced
    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Inputs:
        """Unshard the groups; cast the inputs, and pass them through a post-backward node."""
        start = perf_counter_ns()
        try:
            with named_range("pre_forward", self.name) if is_profiled() else NOTHING:
                if in_transform():
                    return self._begin_in_transform(module, args, kwargs)
                call = self._begin_call()
                if self.casts.of_inputs:
                    args, kwargs = call.stand_ins.through(self.casts.made, args, kwargs)
                self._unshard_for(call, module)
                if call.forward_pass is None:
                    return args, kwargs
                return call.watch_inputs(self.post_backward, args, kwargs)
        finally:
            self.host_ns += perf_counter_ns() - start

    def _begin_in_transform(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Inputs:
        """Begin a call inside a transform of ``torch.func``; see [Note: transforms]."""
        refuse_tracing(self.label)
        call = outside_transforms(self._begin_call)()
        outside_transforms(self._unshard_for)(call, module)
        call.in_transform = True
        args, kwargs = call.stand_ins.through(self.casts.made, args, kwargs)
        if call.forward_pass is None:
            return args, kwargs
        call.watch_inputs(self.post_backward, (), {})
        hook = partial(self.pre_backward, call.forward_pass, None)
        return call.stand_ins.through(partial(watch, hook), args, kwargs)

    def _begin_call(self) -> Call:
        """Enter the forward of the root, or a recomputation, and return the call."""
        if self._initialise is not None:
            self.ensure_initialised()
        context = self.context
        call = Call(current_graph_task() != -1, context.backwards_ended)
        if call.recompute:
            torch.clear_autocast_cache()  # see [Note: autocast]
            context.schedule.begin_recompute(context.enter_backward)
        else:
            # may reset all calls in progress, so ours comes after
            call.position = context.enter_forward(self)
        self._calls.append(call)
        if WATCHERS:
            emit(EventKind.PRE_FORWARD, self.label, rank=self.mesh_info.shard_rank)
        return call

    def _unshard_for(self, call: Call, module: nn.Module) -> None:
        """Hold the groups for ``call`` of ``module``, gather them, and gather others ahead."""
        schedule = self.context.schedule
        first = len(self.modules) == 1 or self._pass.begin(module, self.modules)
        for group in self.groups:
            group.begin_forward(recompute=call.recompute)
            call.leased += 1
            schedule.unshard(group)
        for group in self.groups:
            group.wait_for_unshard()
        if first and not call.recompute:
            order = self.context.record.last_forward
            for target in self.settings.ahead_in_forward(order, call.position, self.name):
                for group in target.groups:
                    group.drop_stale()
                    schedule.prefetch(group)
        if torch.is_grad_enabled():
            call.forward_pass = self._pass_of(call, first=first)
        kept = call.forward_pass
        begin = None if kept is None else partial(self.pre_backward, kept, None)
        for group in self.groups:
            for each in group.extensions:
                call.enter(each.around_forward(self.label, self.groups, begin))

    def _pass_of(self, call: Call, *, first: bool) -> ForwardPass:
        """Return the forward pass that all modules of the list share in one pass over it."""
        shared = None if first else self._pass.shared()
        if shared is None:
            shared = ForwardPass(self._pass_expired, recompute=call.recompute)
            for group in self.groups:
                group.add_pass(shared)
            self._pass.share(shared)
        return shared

    def _pass_expired(self, number: int, thread: int) -> None:
        for group in self.groups:
            group.expired.append(number)
        if self.context.quiet and thread == threading.get_ident():
            for group in self.groups:
                group.release_expired()

    @untraced
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output, cast and watched for its gradient; ends the FORWARD leases.

        ``output`` is None when forward raised.
        """
        start = perf_counter_ns()
        try:
            with named_range("post_forward", self.name) if is_profiled() else NOTHING:
                if output is None:
                    explain_touch(sys.exception())
                if not self._calls:
                    return output  # a pre-hook that ran before ours raised
                call = self._calls.pop()
                call.stand_ins.take_back()
                output = call.stand_ins.returned(output)
                call.leave()
                if call.in_transform:
                    output = self._end_in_transform(call, output)
                else:
                    self._end_call(call, output, call.watch_output(self.pre_backward, output))
                return self.casts.output(output) if self.casts.of_outputs else output
        finally:
            self.host_ns += perf_counter_ns() - start

    def _end_in_transform(self, call: Call, output: Any) -> Any:
        """End a call inside a transform of ``torch.func``, and return the output, watched."""
        if call.forward_pass is not None:
            hook = partial(self.pre_backward, call.forward_pass, None)
            output = watch(hook, output, copy=True)
        outside_transforms(self._end_call)(call, output, call.forward_pass)
        return output

    def _end_call(self, call: Call, output: Any, kept_for: ForwardPass | None) -> None:
        """Return what ``call`` holds, or hand it on to ``kept_for``, if a backward may come."""
        record = self.context.record
        if self.groups and call.recompute:
            record.place_again(self, kept_for)
        elif self.groups:
            place = record.place(self, kept_for, self._pass.place)
            self._pass.place = place if self._pass.unfinished else -1
        if WATCHERS:
            emit(EventKind.POST_FORWARD, self.label, rank=self.mesh_info.shard_rank)
        if kept_for is None:
            torch.clear_autocast_cache()  # see [Note: autocast]
        keep = output is not None and not self.reshards_after_forward
        # a forward that ran a backward reshards as that does
        keep &= self.context.backwards_ended == call.backwards_before
        for group in self.groups[: call.leased]:
            if not call.recompute:
                self.context.schedule.keep_after_forward(
                    group, kept_for, keep=keep, unfinished=self._pass.unfinished
                )
            elif kept_for is not None:
                group.leases.add(LeaseKind.RECOMPUTE)
            group.release(LeaseKind.FORWARD)
        if not call.recompute:
            self.context.leave_forward(raised=output is None and sys.exception() is not None)

    # -- backward ---------------------------------------------------------------------------------

    @untraced
    def pre_backward(self, forward_pass: ForwardPass, inputs: _Given, *_: object) -> None:
        """Unshard the groups at the first gradient of the outputs. ``inputs``: of their call."""
        if forward_pass.in_backward:
            self._announce(forward_pass, inputs)
            return
        start = perf_counter_ns()
        try:
            needs_range = functorch_is_active() or is_profiled()
            with set_apart("pre_backward", self.name) if needs_range else NOTHING:
                context, schedule = self.context, self.context.schedule
                context.enter_backward()
                forward_pass.begin_backward()
                self._announce(forward_pass, inputs)
                if WATCHERS:
                    emit(EventKind.PRE_BACKWARD, self.label, rank=self.mesh_info.shard_rank)
                for group in self.groups:
                    group.begin_backward(forward_pass)
                    if self.unshard_in_backward:
                        schedule.unshard(group)
                for group in self.groups:
                    group.wait_for_unshard()
                order, place = context.record.post_forward, forward_pass.place
                for target in self.settings.ahead_in_backward(order, place, self.name):
                    for group in target.groups:
                        schedule.prefetch(group)
        finally:
            self.host_ns += perf_counter_ns() - start

    def _announce(self, forward_pass: ForwardPass, inputs: _Given) -> None:
        """Tell the pass of a call whose outputs backward reached, and cast its inputs again."""
        if inputs is not None and forward_pass.announce(inputs) and inputs.cast:
            stand_ins = self.casts.put_again(inputs.cast)
            self.context.at_end_of_backward(stand_ins.take_back)

    @untraced
    def post_backward(
        self,
        forward_pass: ForwardPass,
        awaited: list[int],
        grads: tuple[torch.Tensor | None, ...],
        *_: object,
    ) -> tuple[torch.Tensor | None, ...] | None:
        """End a backward once it reached the inputs of all modules of its forward pass.

        Returns the input's gradient, watched, if it may have a backward of its own.
        """
        start = perf_counter_ns()
        try:
            if forward_pass.reach_input(awaited):
                needs_range = functorch_is_active() or is_profiled()
                with set_apart("post_backward", self.name) if needs_range else NOTHING:
                    if not forward_pass.in_backward:  # see [Note: unannounced backward]
                        self.context.enter_backward()
                    forward_pass.close()
                    for group in self.groups:
                        self.context.schedule.end_module_backward(group, forward_pass)
        finally:
            self.host_ns += perf_counter_ns() - start
        if not grads or not torch.is_grad_enabled():
            return None
        return tuple(watch(partial(self.pre_backward, forward_pass, None), grads))

    # -- access -----------------------------------------------------------------------------------

    def ensure_initialised(self) -> None:
        """Make this module the root, unless it has been given one."""
        if self._initialise is not None:
            self._initialise(self)

    @property
    def initialised(self) -> bool:
        """Whether a root was found for it."""
        return self._initialise is None

    def join(self, context: RootContext, *, is_root: bool) -> None:
        """Belong to a root from now on, or be one."""
        self.context, self._initialise = context, None
        self.be_root(is_root)

    @outside_transforms
    def unshard(self, *, async_op: bool) -> None:
        """Gather its groups for a user."""
        if self.context.quiet:  # else the root's forward has done so
            self.context.shared.streams.synchronize_with_current()
        for group in self.own_groups:
            group.unshard_by_hand(async_op=async_op)
        if not async_op:
            self.wait_for_unshard()

    @outside_transforms
    def wait_for_unshard(self) -> None:
        """Wait for the gathers of its groups."""
        for group in self.own_groups:
            group.wait_for_unshard()

    @outside_transforms
    def reshard_now(self) -> None:
        """Return the leases of the user, of graphs, of a prefetch and of kept copies."""
        for group in self.own_groups:
            group.reshard()

    def reset(self) -> None:
        """Forget the calls in progress."""
        for call in reversed(self._calls):
            call.leave()
            call.stand_ins.take_back()
        self._calls.clear()
        self._pass.reset()
