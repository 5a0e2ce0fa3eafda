"""A group's parameters, sharded or gathered: the state machine and the memory behind it.

Owns the state, the transitions, the gather in flight and the choice of the unshard strategy. It
refuses to know who wants the parameters and for how long: ``FSDPParamGroup`` asks for one state or
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fullshard.comm import CommStreams, EventKind, GatherConfig, Layout
from fullshard.comm.buffers.buffers import BufferSource
from fullshard.comm.debug.debug import is_debugging
from fullshard.comm.runtime.observer import emit
from fullshard.comm.transports.collective import AllGatherLike
from fullshard.sharding.base.alone import is_alone
from fullshard.sharding.base.outstanding import Outstanding
from fullshard.sharding.base.policies import Policies
from fullshard.sharding.base.states import TRANSITIONS, ShardedState, check_transition
from fullshard.sharding.gather.aliased import AliasedUnshard
from fullshard.sharding.gather.buffered import BufferedUnshard
from fullshard.sharding.gather.copy_watch import CopyWatch
from fullshard.sharding.gather.hooked import HookedUnshard
from fullshard.sharding.gather.hooked_param import HookContext
from fullshard.sharding.gather.inputs import GatherInputs
from fullshard.sharding.gather.memory import UnshardedMemory
from fullshard.sharding.gather.post_forward import PostForwardUnshard
from fullshard.sharding.gather.shared_buffer import SharedBufferUnshard, open_shared_memory
from fullshard.sharding.gather.strategy import UnshardInFlight, UnshardStrategy
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo
from fullshard.sharding.params.device_shards import DeviceShards
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.plan import GroupPlan
from fullshard.sharding.params.sources import has_hooks
from fullshard.sharding.params.swap import Swap

__all__ = ["Gathering"]

_SHARDED, _UNSHARDED = ShardedState.SHARDED, ShardedState.UNSHARDED
_UNSHARDING, _POST_FORWARD = ShardedState.UNSHARDING, ShardedState.SHARDED_POST_FORWARD


@dataclass(frozen=True)
class _Prepared:
    """What is computed once, before the first gather: a group without it has never been used.

    Attributes:
        plan: the layouts.
        memory: of the parameters without hooks.
        hooked: how the group is gathered, if some have hooks.
    """

    plan: GroupPlan
    memory: UnshardedMemory
    hooked: HookedUnshard | None


class Gathering:
    """The parameters of one group and where they are.

    Attributes:
        params: the parameters.
        name: the group's name, for messages and events.
        rank: this rank's among those that shard, for events.
        state: where the parameters are.
        config: what gathers with its own collective share.
        gathers: gathers launched so far.
        kept_by_graphs: a graph may keep the group, at any time: whether one does now, ranks may see
            differently.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh_info: FSDPMeshInfo,
        policies: Policies,
        config: GatherConfig,
        outstanding: Outstanding,
    ) -> None:
        """Starts sharded.

        Args:
            params: the parameters.
            mesh_info: what they are sharded over.
            policies: what they are gathered as, and where their shards live.
            config: what to gather with.
            outstanding: the forwards for which shards over a post-forward mesh are kept.
        """
        self.params = tuple(params)
        self.name = ""
        self.rank = mesh_info.shard_rank
        self.state = _SHARDED
        self.config = config
        self.gathers = 0
        self.kept_by_graphs = False
        self._mesh_info = mesh_info
        self._policies = policies
        self._outstanding = outstanding
        self._generation = outstanding.generation
        self._gathered_of = self._generation.number
        self._gathered_from = _SHARDED
        self._prepared: _Prepared | None = None
        self._strategy: UnshardStrategy | None = None
        self._chosen_for: AllGatherLike | None = None  # None: it is chosen at the next gather
        self._post_forward_mesh: FSDPMeshInfo | None = None
        self._post_forward: PostForwardUnshard | None = None
        self._in_flight: UnshardInFlight | None = None
        self._swap = Swap(self.params)
        self._on_device = DeviceShards(
            policies.precision, policies.offload, config.device, self._generation
        )
        self._watch = CopyWatch(self._generation)

    # -- set-up -----------------------------------------------------------------------------------

    def share(self, streams: CommStreams, source: BufferSource) -> None:
        """Makes its gathers run on the streams of a root, in its buffers."""
        self.config = replace(self.config, streams=streams, source=source, name=self.name)

    def set_comm(self, comm: AllGatherLike) -> None:
        """Gathers by ``comm`` from now on."""
        self.config = replace(self.config, comm=comm)

    @property
    def post_forward_size(self) -> int:
        """Ranks over which it is sharded between forward and backward; 0: over none but its own."""
        return 0 if self._post_forward_mesh is None else self._post_forward_mesh.shard_world_size

    def set_post_forward_mesh(self, mesh_info: FSDPMeshInfo | None) -> None:
        """Keeps shards over ``mesh_info`` between forward and backward; None: keeps nothing."""
        if mesh_info is not self._post_forward_mesh:
            self._post_forward_mesh = mesh_info
            self._chosen_for = self._post_forward = None

    @property
    def plan(self) -> GroupPlan:
        """The layouts, computed at the first call and when dtypes have changed since."""
        return (self._prepared or self.prepare()).plan

    @property
    def layout(self) -> Layout:
        """Where everything lies in its gathers."""
        return self.plan.gather if self._strategy is None else self._strategy.layout

    @property
    def buffered(self) -> BufferedUnshard | None:
        """What may be gathered with other groups now; None if it is gathered by itself."""
        strategy = self._strategy
        if self.kept_by_graphs or strategy is None or self._chosen_for is not self.config.comm:
            return None
        return strategy.coalesces

    def prepare(self) -> _Prepared:
        """Returns plan and memory, made at the first call and when dtypes have changed since."""
        if self._prepared is None:
            for param in self.params:
                param.resolve_dtypes(self._policies.precision)
            plan = GroupPlan.of(self.params, self._mesh_info.shard_world_size)
            plain = [param for param in self.params if not has_hooks(param.name, param.shard)]
            to_use = [param.sharding.to_use for param in plain]
            memory = UnshardedMemory(
                [param.gather_spec for param in plain], self.config.device, to_use
            )
            for param, unsharded in zip(plain, memory.params, strict=True):
                param.attach_unsharded(unsharded)
            hooked = None
            if len(plain) < len(self.params):
                context = HookContext(
                    mesh_info=self._mesh_info,
                    device=self.config.device,
                    policy=self._policies.precision,
                )
                hooked = HookedUnshard(self.params, memory, plan.gather, context)
            self._prepared = _Prepared(plan, memory, hooked)
        return self._prepared

    def _choose(self, staged: Sequence[torch.Tensor]) -> UnshardStrategy:
        """Returns how to gather from now on; a collective call, where memory is shared."""
        self._chosen_for = self.config.comm
        prepared, config, mesh = self.prepare(), self.config, self._post_forward_mesh
        memory, layout = prepared.memory, prepared.plan.gather
        if mesh is not None:
            inputs = GatherInputs(self.params, layout)
            ordinary = prepared.hooked or BufferedUnshard(memory, inputs, layout)
            if self._post_forward is None:
                self._post_forward = PostForwardUnshard(ordinary, mesh)
            return ordinary
        if prepared.hooked is not None:
            return prepared.hooked
        inputs = GatherInputs(self.params, layout)
        to_use = [param.sharding.to_use for param in self.params]
        if layout.world_size == 1 and is_alone(config):
            own = [param.shard for param in self.params]
            if all(shard is found for shard, found in zip(staged, own, strict=True)):
                return AliasedUnshard(memory, inputs, layout, to_use)
        shared = open_shared_memory(layout, config, to_use) if memory.movable else None
        if shared is not None:
            return SharedBufferUnshard(memory, shared, inputs)
        return BufferedUnshard(memory, inputs, layout)

    def _plan_anew(self) -> None:
        """Forgets what was prepared, as parameters are others now; nothing is unsharded."""
        self.leave_post_forward()
        self._prepared = self._strategy = self._post_forward = None
        self._on_device.forget()

    def adopt_registered(self) -> bool:
        """Looks at what the modules hold now, and returns whether anything changed.

        So it does if the policy now answers otherwise, as a new root gives parameters other names.
        See ``FSDPParam.adopt_registered``.
        """
        changed = [param.adopt_registered() for param in self.params]
        if self.state is not _UNSHARDED:
            self._swap.shut()
        if self._prepared is not None:
            changed += [not param.has_dtypes_of(self._policies.precision) for param in self.params]
        if any(changed):
            self.reshard()
            self._plan_anew()
        return any(changed)

    @property
    def replaced(self) -> bool:
        """Whether modules hold something else than its parameters: a user put it there."""
        return self._swap.replaced

    def lend(self) -> None:
        """Lets modules hold copies, which count as no replacement until the next swap."""
        self._swap.forget()

    def note(self) -> None:
        """Begins to watch full parameters that nobody uses now."""
        if self.state is _UNSHARDED:
            self._swap.note()

    def changed(self) -> list[str]:
        """Ends that, and returns those that a user changed, which their shards do not know."""
        changed = self._swap.changed()
        if changed:
            self.prepare().memory.put_back()
        return changed

    def resolve_again(self) -> None:
        """Plans anew if the policy answers otherwise under the names that parameters have now."""
        dtypes = self._policies.precision
        if self._prepared is None or all(param.has_dtypes_of(dtypes) for param in self.params):
            return
        self.reshard()
        self._plan_anew()

    # -- the state machine ------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether the parameters changed since the last gather from the ordinary shards."""
        return self._gathered_of != self._generation.number

    def _become(self, after: ShardedState) -> None:
        if after not in TRANSITIONS[self.state]:
            check_transition(self.state, after, self.name)
        self.state = after

    def unshard(self, *, async_op: bool = False) -> bool:
        """Issues the gather, and returns whether there was one to issue."""
        if self.state is _UNSHARDED or self.state is _UNSHARDING:
            self._watch.reused(self.params)
            if self.state is _UNSHARDED:
                self._swap.to_unsharded()  # functional_call puts back what was there before it
            return False
        if self._post_forward is not None and self._use_post_forward():
            emit(EventKind.UNSHARD, self.name, rank=self.rank)
            self._watch.reused(self.params)
            kept = self._post_forward
            kept.launch(kept.shards, self.config, async_op=async_op)
            self.begin(kept)
            return True
        staged = self.stage()
        strategy = self._strategy
        if strategy is None or self._chosen_for is not self.config.comm:
            strategy = self._strategy = self._choose(staged)
        strategy.launch(staged, self.config, async_op=async_op)
        self.begin(strategy)
        return True

    def stage(self) -> Sequence[torch.Tensor]:
        """Returns the ordinary shards as the copy-in stream sees them, on their way to a gather."""
        if self._prepared is None:
            self.prepare()
        emit(EventKind.UNSHARD, self.name, rank=self.rank)
        self._gathered_of = self._generation.number
        if self._watch.sums or is_debugging():
            self._watch.copied(self.params, self._on_device.serving)
        return self._on_device.of(self.params, self.config.streams)

    def begin(self, in_flight: UnshardInFlight) -> None:
        """Takes part in a gather that was launched."""
        self._in_flight = in_flight
        self._gathered_from = self.state
        self.gathers += 1
        self._become(_UNSHARDING)

    def wait(self, *, private: bool, movable: bool) -> None:
        """Finishes the gather: the modules hold full parameters after it.

        Args:
            private: a user holds them, who may write.
            movable: no graph holds an alias of them.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            if private and self.state is _UNSHARDED:
                self.prepare().memory.take_private(movable=movable)
            return
        in_flight.land(private=private, movable=movable)
        self._swap.to_unsharded()
        self._become(_UNSHARDED)
        emit(EventKind.WAIT, self.name, rank=self.rank)

    def register(self) -> None:
        """Makes the modules hold what the group is now, whatever they were given."""
        if self.state is _UNSHARDED:
            self._swap.to_unsharded()
            return
        for param in self.params:
            param.install_sharded()
        self._swap.shut()

    def sync_requires_grad(self) -> None:
        """Lets parameters be frozen, or thawed, on whichever is registered now."""
        if self.state is _UNSHARDED:
            self._swap.sync_requires_grad()

    def reshard(self, *, after_forward: bool = False) -> None:
        """Frees the full parameters; ``after_forward``: keeps shards for a post-forward mesh."""
        kept = self._post_forward
        if self.state is _UNSHARDED:
            assert self._strategy is not None, "it was gathered"
            few = after_forward and kept is not None and bool(self._outstanding)
            if few and kept is not None:
                kept.keep()
            self._swap.to_sharded()
            self._strategy.free()
            self._become(_POST_FORWARD if few else _SHARDED)
            emit(EventKind.RESHARD, self.name, rank=self.rank)
            if few:
                return
        elif self.state is _UNSHARDING:
            self._discard()
        if kept is not None and not self._use_post_forward():
            kept.drop()

    def _discard(self) -> None:
        """Ends a gather that nobody wants, or whose copy-out raised."""
        in_flight, self._in_flight = self._in_flight, None
        self._become(self._gathered_from)
        if in_flight is not None:
            in_flight.discard()
        assert self._strategy is not None, "it was launched"
        self._strategy.free()

    # -- over a post-forward mesh -----------------------------------------------------------------

    def _use_post_forward(self) -> bool:
        """Tells whether to gather from what was kept; leaves it if it is stale or unneeded."""
        if self.state is not _POST_FORWARD:
            return False
        if self._outstanding and not self.stale:
            return True
        self._become(_SHARDED)
        return False

    def leave_post_forward(self) -> None:
        """Gives back the shards over the post-forward mesh."""
        if self._post_forward is not None and self.state is _POST_FORWARD:
            self._become(_SHARDED)
            self._post_forward.drop()
