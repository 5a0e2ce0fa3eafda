"""A group's parameters, sharded or gathered: the state machine and the memory behind it.

Owns the state, the transitions and the gather in flight. ``GatherSetup`` chooses how to gather.
Refuses to know who needs the parameters and for how long: ``FSDPParamGroup`` asks for one state or
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fullshard.comm import AllGather, CommStreams, EventKind, GatherConfig, Layout
from fullshard.comm.spi import LISTENERS, BufferSource, emit
from fullshard.sharding.base.compat import current_graph_task
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.base.policies import Policies
from fullshard.sharding.base.states import TRANSITIONS, ShardedState, illegal_transition
from fullshard.sharding.extension import GroupExtension
from fullshard.sharding.gather.setup import GatherSetup
from fullshard.sharding.gather.strategy import FinishesGather, Holders, UnshardStrategy
from fullshard.sharding.mesh.mesh_info import TwoLevelMeshInfo
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.swap import Swap

__all__ = ["Gathering"]

_SHARDED, _UNSHARDED = ShardedState.SHARDED, ShardedState.UNSHARDED
_UNSHARDING = ShardedState.UNSHARDING


class Gathering:
    """The parameters of one group and where they are.

    Attributes:
        params: the parameters.
        name: the group's name, for messages and events.
        rank: this rank's among those that shard, for events.
        state: where the parameters are.
        config: what gathers with its own collective share.
        swap: what puts parameters into modules.
        setup: how they are gathered.
        in_flight: a gather that it takes part in, until it is finished.
        gathers: gathers launched so far.
        kept_by_graphs: a graph may keep the group, at any time: whether one does now, ranks may see
            differently.
        keeps_full: full parameters outlive a reshard; see [Note: kept copies].
        keeps_copies: whether full parameters or compute shards outlive a reshard.
        within_step: the last backward was one that others of the same step follow.
        extensions: of the group; see ``GroupExtension``.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        policies: Policies,
        config: GatherConfig,
        generation: ParameterGeneration,
    ) -> None:
        """Start sharded.

        Args:
            params: the parameters.
            policies: what they are gathered as, and where their shards live.
            config: what to gather with.
            generation: of its parameters.
        """
        self.params = tuple(params)
        self.name = ""
        self.rank = config.process_group.rank()
        self.state = _SHARDED
        self.config = config
        self.swap = Swap(self.params)
        self.setup = GatherSetup(params, policies, config.device, generation)
        self.in_flight: object = None
        self.gathers = 0
        self.kept_by_graphs = False
        self.keeps_full = self.within_step = False
        self._two_levels = isinstance(params[0].mesh_info, TwoLevelMeshInfo)
        self.keeps_copies = self._two_levels
        self._full_of = -1  # the generation of full parameters that outlived a reshard
        self._user_wrote = False
        self._wire = policies.wire
        self._generation = generation
        self._gathered_of = generation.number
        self._finishes: FinishesGather | None = None  # the gather in flight
        self.extensions: Sequence[GroupExtension] = ()

    # -- set-up -----------------------------------------------------------------------------------

    def share(self, streams: CommStreams, source: BufferSource) -> None:
        """Make its gathers run on the streams of a root, in its buffers."""
        self.config = replace(self.config, streams=streams, source=source, name=self.name)

    def set_comm(self, comm: AllGather) -> None:
        """Gather by ``comm`` from now on."""
        self.config = replace(self.config, comm=comm)

    def keep_storage(self, keep: bool) -> None:
        """Keep the memory of the full parameters allocated while they are sharded, or free it.

        This memory belongs to this rank only. Autograd may read an alias of a sharded parameter in
        it: the values are those of the last gather, as if the parameter were still unsharded.
        """
        setup = self.setup
        if keep == setup.keeps_storage:
            return
        setup.keeps_storage = keep
        setup.choose_again()
        if setup.prepared is not None:
            memory = setup.prepared.memory
            memory.stays = keep
            if not keep and self.state is _SHARDED:
                memory.free()
                self.swap.to_sharded(freed=not memory.home.stays)

    def keep_full(self, keep: bool) -> None:
        """Keep full parameters when the group is resharded; see [Note: kept copies].

        The modules hold the sharded parameters nevertheless, and the next use of the group takes
        the kept copy instead of a gather. A copy that a user may have written to is not kept.
        """
        if keep != self.keeps_full:
            self.drop_full()
            self.keeps_full = keep
            self.keeps_copies = keep or self._two_levels
            self.setup.choose_again()  # groups that are full at once need memory of their own

    def drop_full(self) -> None:
        """Free full parameters that outlived a reshard."""
        if self._full_of != -1 and self.setup.strategy is not None:
            self._full_of = -1
            self.setup.strategy.memory.free()

    def drop_copies(self) -> None:
        """Let the next gather start from the stored shards."""
        self.drop_full()
        if self.setup.prepared is not None:
            self.setup.prepared.inputs.forget_copies()

    @property
    def has_full(self) -> bool:
        """Whether the next use of the sharded group needs no gather."""
        return self._full_of == self._generation.number

    @property
    def layout(self) -> Layout:
        """The layout of the group's gathers."""
        return self.setup.layout

    @property
    def strategy(self) -> UnshardStrategy | None:
        """How the group is gathered now; None where the next gather chooses."""
        return self.setup.strategy if self.setup.chosen_for is self.config.comm else None

    def adopt_registered(self, params: Sequence[FSDPParam] | None = None) -> bool:
        """Look at what the modules hold now, and return whether gathers are to be prepared again.

        Gathers are prepared again if a parameter that they used changed since the last look: see
        ``FSDPParam.adopt_registered``. A policy of dtypes may answer otherwise, too, under the
        names that a new root gives to parameters.

        Args:
            params: those to look at, of a sharded group; None: all.
        """
        changed, wire = False, self._wire
        for param in self.params if params is None else params:
            replaced = param.adopt_registered()
            changed |= param.resolve_dtypes(wire) or replaced
        if params is None and self.state is not _UNSHARDED:
            self.swap.to_sharded()
        if self.setup.prepared is None or not changed:
            return False
        self.reshard()
        self.drop_full()
        self.setup.forget()
        self._finishes = None
        return True

    # -- the state machine ------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether the parameters changed since the last gather from the ordinary shards."""
        return self._gathered_of != self._generation.number

    def _become(self, after: ShardedState) -> None:
        if after not in TRANSITIONS[self.state]:
            raise illegal_transition(self.state, after, self.name)
        self.state = after

    def launch_gather(self, *, async_op: bool = False) -> bool:
        """Launch the gather unless full parameters exist; return whether one was launched."""
        if self.state is _UNSHARDED or self.state is _UNSHARDING:
            if self.state is _UNSHARDED:
                self._note_reuse()
                self.swap.sync_requires_grad()  # a user may have frozen what is registered now
                self.swap.to_unsharded()  # functional_call puts back what was there before it
            return False
        setup = self.setup
        if self._full_of != -1:
            if self.has_full and setup.chosen_for is self.config.comm:
                self._use_full()
                return False
            self.drop_full()
        strategy = setup.strategy
        if strategy is None or setup.chosen_for is not self.config.comm:
            strategy = setup.choose(self.config)
        self.announce(strategy)
        self.set_in_flight(strategy.launch(self.config, async_op=async_op), strategy)
        return True

    def announce(self, strategy: UnshardStrategy) -> None:
        """Announce a gather by ``strategy``, right before its launch."""
        if LISTENERS:
            emit(EventKind.UNSHARD, self.name, rank=self.rank)
        for each in self.extensions:
            each.before_gather(from_copies=strategy.inputs.has_copies)

    def set_in_flight(self, in_flight: object, finishes: FinishesGather) -> None:
        """Take part in a gather that was launched, and that ``finishes`` ends."""
        self.in_flight, self._finishes = in_flight, finishes
        self._gathered_of = self._generation.number
        self.gathers += 1
        self._become(_UNSHARDING)

    def _use_full(self) -> None:
        """Put full parameters that outlived a reshard into the modules."""
        self._note_reuse()
        self._full_of = -1
        self._become(_UNSHARDING)
        self.swap.to_unsharded()
        self._become(_UNSHARDED)

    def _note_reuse(self) -> None:
        for each in self.extensions:
            each.on_reuse()

    def finish_gather(self, holders: Holders) -> None:
        """Finish the gather: the modules hold full parameters after it."""
        self._user_wrote |= holders.user_may_write
        in_flight, self.in_flight = self.in_flight, None
        prepared = self.setup.prepared
        if in_flight is not None and self._finishes is not None:
            self._finishes.finish(in_flight, holders)
            self.swap.to_unsharded()
            self._become(_UNSHARDED)
            if LISTENERS:
                emit(EventKind.WAIT, self.name, rank=self.rank)
            for each in self.extensions:
                each.after_gather()
        elif prepared is not None and holders.user_may_write and self.state is _UNSHARDED:
            prepared.memory.point_at(prepared.memory.home, holders)
        if prepared is not None and holders.in_block:
            prepared.memory.home.make_private()

    def register(self) -> None:
        """Make the modules hold what the group is now, whatever they were given."""
        if self.state is _UNSHARDED:
            self.swap.to_unsharded()
            return
        for param in self.params:
            param.install_sharded()
        self.swap.to_sharded()

    def reshard(self, *, after_forward: bool = False) -> None:
        """Free the full parameters; ``after_forward``: keep compute shards over few ranks."""
        strategy, state = self.setup.strategy, self.state
        if state is _SHARDED or strategy is None:
            return
        try:
            for each in self.extensions if state is _UNSHARDED else ():
                each.before_reshard()
        finally:  # an error leaves no full parameters behind
            self._free(strategy, state, after_forward)

    def _free(self, strategy: UnshardStrategy, state: ShardedState, after_forward: bool) -> None:
        """Leave ``state``, for which ``strategy`` gathered, or begins to."""
        keeps_full = self.keeps_full and not (self._user_wrote or self.stale)
        keeps_full = keeps_full and (torch.is_grad_enabled() or current_graph_task() != -1)
        if state is _UNSHARDED:
            self.swap.to_sharded(freed=not (keeps_full or strategy.memory.home.stays))
            if after_forward and strategy.inputs.cuts_full and not (keeps_full or self.stale):
                strategy.inputs.keep_copies(strategy.write_views, self.config)
        self._become(_SHARDED)
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None and self._finishes is not None:  # no one needs the gather
            self._finishes.discard(in_flight)
        if keeps_full and state is _UNSHARDED:
            self._full_of = self._generation.number
        else:
            strategy.memory.free()
        self._user_wrote = False
        if LISTENERS and state is _UNSHARDED:
            emit(EventKind.RESHARD, self.name, rank=self.rank)
