"""A parameter group: leases say who holds it unsharded, and for how long.

``FSDPParamGroup`` decides by leases when a group is gathered and resharded. ``Gathering`` does both
and has the state. ``GroupGradients`` collects gradients. Modules and the schedule are in ``hooks``.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import cast

import torch

from fullshard.comm import EventKind, GatherConfig
from fullshard.comm.spi import LISTENERS, emit
from fullshard.sharding.base.compat import not_pickled, untraced
from fullshard.sharding.base.forward_pass import ForwardPass, ParameterGeneration, Root
from fullshard.sharding.base.policies import Policies
from fullshard.sharding.base.states import (
    BackwardStage,
    LeaseKind,
    Leases,
    ShardedState,
    TrainingState,
)
from fullshard.sharding.extension import EXTENSIONS, GroupExtension, made_by
from fullshard.sharding.gather.gathering import Gathering
from fullshard.sharding.gather.strategy import Holders
from fullshard.sharding.params.lookup import owner_of
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.reduce.gradients import GroupGradients
from fullshard.sharding.reduce.reduction import RootComm
from fullshard.sharding.reduce.strategies import ReadyReductions

__all__ = ["FSDPParamGroup", "group_of"]

_WRITERS = {LeaseKind.USER, LeaseKind.BLOCK}
"""Leases of those who may write to full parameters."""
_UNANNOUNCED = (BackwardStage.NONE, BackwardStage.GRADIENT)


class FSDPParamGroup:
    """The parameters of one call, which share ``mesh_info``, ``device``, ``rank`` and ``policies``.

    Attributes:
        name: for messages and events.
        params: its parameters, in the order of their first place in the modules.
        leases: who holds it unsharded.
        full_after_backward: whether its module keeps it unsharded after backward.
        copied: whether modules hold a block's copies of its parameters, which are not taken over.
        generation: which version of its parameters there is.
        shared: what it communicates through, with all groups of its root.
        gathering: where its parameters are.
        gradients: its gradients and how they are reduced.
        expired: numbers of forwards whose graphs were freed, until what they held is released.
        roots: the roots that have the group: several where their models tie a parameter.
        extensions: features outside the core; see ``GroupExtension``.
    """

    def __init__(self, params: Sequence[FSDPParam], policies: Policies, shared: RootComm) -> None:
        """Start sharded, and communicates through what its module shares until a root is found.

        Args:
            params: sharded over the same process groups.
            policies: what they are gathered as, and where their shards live.
            shared: streams, buffers and queue.
        """
        self.name = ""
        self.params = tuple(params)
        self.mesh_info = mesh_info = params[0].mesh_info
        self.device = params[0].device
        self.policies = policies
        self.shared = shared
        self.rank = mesh_info.shard_rank
        self.leases = Leases()
        self.full_after_backward = self.copied = False
        self.expired: deque[int] = deque()  # filled by any thread
        self.generation = ParameterGeneration()
        for param in params:
            param.group, param.generation = self, self.generation
            param.on_gradient = self.gradient_arrived
        self.roots: Sequence[weakref.ref[Root]] = ()
        process_group = mesh_info.shard_process_group
        config = GatherConfig(
            comm=policies.wire.all_gather(process_group),
            process_group=process_group,
            streams=shared.streams,
            device=self.device,
            source=shared.source,
        )
        self.gathering = Gathering(params, policies, config, self.generation)
        self.gradients = GroupGradients(self.params, self.device, shared, policies.wire)
        self._live: set[weakref.ref[ForwardPass]] = set()  # a WeakSet's methods are in Python
        self._checked_in_this_forward = False
        self._begun: set[ForwardPass] = set()  # those that the present backward reached
        self.extensions: tuple[GroupExtension, ...] = ()
        for make in EXTENSIONS:
            self.extend(made_by(make, self))

    # -- set-up -----------------------------------------------------------------------------------

    def extend(self, extension: GroupExtension) -> None:
        """Call ``extension`` from now on, after those that were added before."""
        self.extensions = (*self.extensions, extension)
        self.gathering.extensions = self.generation.extensions = self.extensions

    def rename(self, name: str) -> None:
        """Give it its name: the full name of its module."""
        self.name = self.gathering.name = self.gradients.setups.name = name

    def share(self, shared: RootComm) -> None:
        """Make the group run on the streams of its root and queue its reductions there."""
        self.shared = shared
        self.gathering.share(shared.streams, shared.source)
        self.gradients.setups.share(shared)

    def adopt_registered(self, params: Sequence[FSDPParam] | None = None) -> None:
        """Adopt the parameters that the modules hold now; see ``Gathering.adopt_registered``."""
        self.shared.queue.commit_sealed()  # to the parameters that are about to be replaced
        before = [param.sharded for param in self.params]
        if self.gathering.adopt_registered(params):
            both = zip(self.params, before, strict=True)
            self.gradients.forget({param for param, old in both if param.sharded is not old})

    def adopt_replaced(self) -> None:
        """Adopt the parameters that a user put into the place of others, if there are any.

        Raises:
            ValueError: if one is not sharded as the parameter was, or not in all places of a tie.
        """
        if self.gathering.swap.replaced and not self.copied:
            self.gathering.swap.require_tied()
            self.adopt_registered()

    # -- the state machine ------------------------------------------------------------------------

    @property
    def state(self) -> ShardedState:
        """Where its parameters are."""
        return self.gathering.state

    @property
    def training_state(self) -> TrainingState:
        """The state of the group, for people to read."""
        if self.leases.training_state is TrainingState.IDLE and self.gradients.reduced:
            return TrainingState.POST_BACKWARD
        return self.leases.training_state

    def wait_for_unshard(self) -> None:
        """Finish the gather: the modules hold full parameters after it."""
        out = self.leases.out
        may_write, in_block = not _WRITERS.isdisjoint(out), LeaseKind.BLOCK in out
        self.gathering.finish_gather(Holders(may_write, in_block, no_graph_alias=not self._live))

    def reshard_if_unheld(self) -> None:
        """Reshard if the group has no lease."""
        if not self.leases.out:
            self.gathering.reshard()

    def drop_stale(self) -> None:
        """Discard an unsharded copy that is stale, before a forward or a user takes it.

        A copy is stale if the parameters changed, or if only graphs of earlier forwards hold it,
        which other ranks may lack; see [Note: shared facts]. Replaced parameters are adopted first.

        Raises:
            ValueError: if it is not sharded as the parameter was.
        """
        if self.generation.data_was_set:
            self.gathering.swap.require_own_data()
        self.adopt_replaced()
        has_copy = self.gathering.state is not ShardedState.SHARDED or self.leases.out
        if has_copy and self.gathering.stale:
            self.leases.drop(LeaseKind.KEPT, LeaseKind.PREFETCH, LeaseKind.GRAPH)
            self.gathering.reshard()
        elif LeaseKind.GRAPH in self.leases.out and not self._checked_in_this_forward:
            self.leases.drop(LeaseKind.GRAPH)
            self.reshard_if_unheld()
        self._checked_in_this_forward = True

    def end_of_forward(self) -> None:
        """End the root's forward: what graphs hold from now on is a rank's own affair."""
        self._checked_in_this_forward = False
        if LeaseKind.PREFETCH in self.leases.out:
            self.drop_leases(LeaseKind.PREFETCH)

    # -- leases -----------------------------------------------------------------------------------

    def begin_forward(self, *, recompute: bool) -> None:
        """Take a FORWARD lease; first free stale full parameters, if it is no recomputation."""
        if not recompute:
            self.drop_stale()
        self.leases.claim(LeaseKind.FORWARD)

    def begin_backward(self, forward_pass: ForwardPass) -> None:
        """Hold the group for the backward of a forward."""
        self.leases.claim(LeaseKind.BACKWARD, forward_pass.number)
        self._begun.add(forward_pass)
        self.gradients.reach()

    @not_pickled
    @untraced
    def gradient_arrived(self, gradient: torch.Tensor) -> None:
        """Begin a backward that reached a parameter and no output of the group's modules.

        [Note: unannounced backward] The hooks on outputs announce a backward to the group. A loss
        may be made of other tensors: one that a module kept, or a penalty on a parameter. Then the
        first gradient announces the backward, so that its end reduces the group.
        """
        if self.gradients.stage in _UNANNOUNCED:
            self.gradients.stage = BackwardStage.GRADIENT
            for root in self.live_roots:
                root.enter_backward()

    @property
    def live_roots(self) -> list[Root]:
        """The roots of models that exist."""
        return [root for each in self.roots if (root := each()) is not None]

    def hold_for_graph(self, number: int) -> None:
        """Take the lease of a forward that keeps the group for its backward."""
        self.gathering.kept_by_graphs = True
        self.leases.add_once(LeaseKind.GRAPH, number)
        self._note_idle()

    def keep(self) -> None:
        """Take a lease without a holder: the group stays unsharded for its next use."""
        self.leases.add_once(LeaseKind.KEPT)
        self._note_idle()

    def _note_idle(self) -> None:
        is_full = self.extensions and self.state is ShardedState.UNSHARDED
        for each in self.extensions if is_full and _WRITERS.isdisjoint(self.leases.out) else ():
            each.on_idle()

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters, while the full ones wait for a backward."""
        if self.leases.out:
            self.drop_leases(LeaseKind.KEPT)
            if _WRITERS.isdisjoint(self.leases.out) and self.state is ShardedState.UNSHARDED:
                self.gathering.swap.to_sharded()

    def release(self, kind: LeaseKind, owner: int = 0) -> None:
        """Return a lease; reshard when none is left."""
        self.leases.release(kind, owner)
        if not self.leases.out:
            self.gathering.reshard(after_forward=kind is LeaseKind.FORWARD)

    def prefetch(self) -> bool:
        """Gather ahead of use, unless it is unsharded or being so; return whether it did."""
        if self.gathering.state in (ShardedState.UNSHARDING, ShardedState.UNSHARDED):
            return False
        if self.gathering.keeps_full and self.gathering.has_full:
            return False
        self.leases.add_once(LeaseKind.PREFETCH)
        if LISTENERS:
            emit(EventKind.PREFETCH, self.name, rank=self.rank)
        return self.gathering.launch_gather(async_op=True)

    def unshard_by_hand(self, *, async_op: bool) -> None:
        """Gather for a user; the next forward or backward that uses the group takes over."""
        if not self.leases.in_use:
            self.drop_stale()
            self.gathering.drop_copies()
            self.leases.add_once(LeaseKind.USER)
        self.gathering.launch_gather(async_op=async_op)

    def reshard(self) -> None:
        """Return what all hold but a forward or backward."""
        kept = (LeaseKind.GRAPH, LeaseKind.PREFETCH, LeaseKind.STEP, LeaseKind.KEPT)
        self.drop_leases(*_WRITERS, *kept)

    def drop_leases(self, *kinds: LeaseKind) -> None:
        """Give back every lease of ``kinds``, and reshard if no lease remains."""
        self.leases.drop(*kinds)
        self.reshard_if_unheld()

    # -- forwards that a backward may follow ------------------------------------------------------

    def add_pass(self, forward_pass: ForwardPass) -> None:
        """Count a forward as outstanding, unless it is a recomputation, which may never end."""
        self._live.add(weakref.ref(forward_pass, self._live.discard))
        if not forward_pass.recompute:
            self.generation.outstanding.add(forward_pass.number)

    def release_expired(self) -> None:
        """Release what forwards held whose graphs were freed; between steps."""
        while self.expired:
            number = self.expired.popleft()
            self.generation.expire(number)
            self.leases.release(LeaseKind.GRAPH, number)
            self.release(LeaseKind.BACKWARD, number)

    def note_pass_ended(self, forward_pass: ForwardPass) -> bool:
        """End a backward, which reached the inputs; return whether it was the last outstanding one.

        A forward of earlier parameters counts, too, once backward has reached it.
        """
        self._begun.discard(forward_pass)
        if LISTENERS:
            emit(EventKind.POST_BACKWARD, self.name, rank=self.rank)
        outstanding = self.generation.outstanding
        counted = forward_pass.number in outstanding
        outstanding.discard(forward_pass.number)
        return not (outstanding or self._begun) and (counted or forward_pass.recompute)

    def release_backward(self, number: int, *, keep: bool) -> None:
        """Return what forward ``number`` holds for its backward, and one recomputation, if any.

        Reshards if no lease is left. ``keep``: the group stays unsharded, under a KEPT lease.
        """
        self.leases.release(LeaseKind.GRAPH, number)
        self.leases.release(LeaseKind.RECOMPUTE)
        if keep and self.gathering.state is ShardedState.UNSHARDED:
            self.keep()
        self.release(LeaseKind.BACKWARD, number)

    def end_backward(self, *, keep: bool, keep_ahead: bool) -> ReadyReductions:
        """End all that backward left open, once at its end; return the reductions to launch now.

        ``GroupGradients.end_backward`` follows, once the reductions are launched.

        Args:
            keep: the group stays unsharded, if backward reached it.
            keep_ahead: a gather ahead of use that no module claimed stays for the next backward.
        """
        gradients, leases = self.gradients, self.leases
        unsharding = self.gathering.state is ShardedState.UNSHARDING
        if unsharding or (gradients.stage is BackwardStage.NONE and not keep):
            leases.drop(LeaseKind.USER)  # else it was taken after this backward was done
        self._close_begun_passes()
        if leases.out:
            leases.drop(LeaseKind.BACKWARD, LeaseKind.RECOMPUTE)
            if not keep_ahead:
                leases.drop(LeaseKind.PREFETCH)
        if gradients.stage is BackwardStage.GRADIENT:
            # the graph that holds it may live on, and hide the gradients
            leases.drop(LeaseKind.GRAPH, LeaseKind.KEPT)
        if gradients.stage is BackwardStage.REDUCED:
            if self.gathering.state is not ShardedState.SHARDED:
                self.release_backward(0, keep=keep)
            return ()
        reached = gradients.stage is not BackwardStage.NONE or gradients.in_unsynced_backward
        reached = reached or gradients.waiting or gradients.setups.strategy.owes
        ready = gradients.pop_ready(reduce=reached)
        self.release_backward(0, keep=reached and keep)
        return ready

    def _close_begun_passes(self) -> None:
        """End the passes that backward reached but did not leave through a module's inputs."""
        begun, self._begun = self._begun, set()
        for each in begun:
            each.close()
            self.generation.outstanding.discard(each.number)
            self.leases.release(LeaseKind.GRAPH, each.number)
        if begun and LISTENERS:
            emit(EventKind.POST_BACKWARD, self.name, rank=self.rank)

    def reset(self) -> bool:
        """Return to a clean sharded state, and whether earlier gradients were dropped."""
        for each in [known() for known in list(self._live)]:
            if each is not None:
                each.close()
        self._begun.clear()
        self.generation.outstanding.clear()
        self.leases = Leases()
        self.reshard_if_unheld()
        for extension in self.extensions:
            extension.on_reset()
        return self.gradients.abandon()

    def __repr__(self) -> str:
        """Show name and state."""
        return f"FSDPParamGroup({self.name}, {self.state.name}, {self.leases})"


def group_of(param: torch.Tensor) -> FSDPParamGroup | None:
    """Return the group of ``param``, given the sharded parameter or the one that it replaced."""
    owner = owner_of(param)
    return None if owner is None else cast(FSDPParamGroup, owner.group)
