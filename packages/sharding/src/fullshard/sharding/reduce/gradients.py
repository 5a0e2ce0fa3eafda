"""The gradients of a group: collected from autograd, accumulated, reduced.

Owns what is set per group about reduction (synchronisation on or off, divide factor, the
collective) and where the group stands in the present backward. [Note: one reduction] A group
reduces when no forward of the group is outstanding, which all ranks know. The layout is always
equal, with zeros for a parameter without a gradient on this rank. So ranks that use different
parameters of a group still issue the same collectives. The used-parameter mask, which marks the
parameters that any rank used, is sent with the reduction. A group reduces once per backward; only
reentrant checkpointing, which hides forwards from us until backward reruns them, can make a group
that it reruns twice reduce twice. Gradients of backwards without communication are accumulated
until a backward communicates.

[Note: ways] A small reduction is coalesced with reductions of the groups that are gathered before
and after it; see ``buckets``. Other reductions are launched alone. ``ReductionQueue`` launches what
is ready here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fullshard.comm import (
    ReduceConfig,
    ReduceScatter,
    default_reduce_scatter,
    reduction_scaling,
)
from fullshard.comm.spi import backend_averages, coalesced_cap_mb, rank_major
from fullshard.sharding.mesh.mesh_info import HSDPMeshInfo, TwoLevelMeshInfo
from fullshard.sharding.mesh.placements import EarlyReduction
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.protocols import WireForms
from fullshard.sharding.reduce.accumulation import Accumulation
from fullshard.sharding.reduce.coalesced import CoalescedReduction
from fullshard.sharding.reduce.reduction import (
    ReadyReductions,
    ReduceSettings,
    ReductionSetup,
    SharedComm,
)
from fullshard.sharding.reduce.strategies import (
    AliasReduce,
    HybridReduce,
    PlainReduce,
    TwoLevelReduce,
)

__all__ = ["GroupGradients"]


class GroupGradients:
    """The gradients of one group.

    Attributes:
        name: the group's, for messages and events.
        settings: what users set; see ``change``.
        strategy: how the group reduces; see [Note: reduce strategies].
        accumulation: gradients that are not reduced yet, and whether to reduce at all.
        reductions: reductions that were ready so far.
        in_backward: whether the present backward reached a forward of the group.
        in_unsynced_backward: whether a backward without synchronisation reached the group since the
            last reduction; this is equal on all ranks, but the set of gradients may differ.
        unannounced: whether a gradient was the first that the group knew of the backward.
        reduced: whether the present backward reduced the group.
        grads_after_reduce: whether it ended a forward of the group after that, whose gradients
            are still to be reduced.
        bucket: the queue for reductions of groups that are gathered together; see ``Buckets``.
        accumulate: what a backward reduces that is not the last of a step.
    """

    def __init__(
        self, params: Sequence[FSDPParam], device: torch.device, shared: SharedComm, wire: WireForms
    ) -> None:
        """Start with none."""
        self.name = ""
        self._wire = wire
        self.params = params
        self.mesh_info = mesh_info = params[0].mesh_info
        self.device = device
        self.accumulation = Accumulation(params)
        self.reductions = 0
        self.in_backward = self.unannounced = self.reduced = self.grads_after_reduce = False
        self.in_unsynced_backward = False
        self.bucket: CoalescedReduction | None = None
        self.early_reduction = EarlyReduction.ALL
        self._shared = shared
        self._default_comm = default_reduce_scatter(mesh_info.shard_process_group)
        self.settings = ReduceSettings(
            process_group=mesh_info.shard_process_group,
            cap_mb=coalesced_cap_mb(mesh_info.shard_world_size),
        )
        self.strategy = PlainReduce()
        if isinstance(mesh_info, TwoLevelMeshInfo):
            self.strategy = TwoLevelReduce(mesh_info.second.shard_process_group)
        elif isinstance(mesh_info, HSDPMeshInfo):
            self.strategy = HybridReduce(mesh_info.replicate_process_group)
        self._setups: dict[tuple[bool, ...], Sequence[ReductionSetup]] = {}

    def announce_last(self, is_last: bool) -> None:
        """Note whether the next backward is the last of a step; others reduce less if so asked."""
        waits = EarlyReduction.ALL if is_last else self.early_reduction
        self.accumulation.waits_for_last = waits is EarlyReduction.NONE
        self.strategy.wait_for_last(waits is EarlyReduction.FIRST)

    def share(self, shared: SharedComm) -> None:
        """Make the reductions run on the streams of a root and wait in its queue."""
        self._shared = shared
        self._setups.clear()

    def change(self, **settings: Any) -> None:
        """Set some of ``ReduceSettings``, for reductions from now on."""
        self.settings = replace(self.settings, **settings)
        self._setups.clear()

    @property
    def comm(self) -> ReduceScatter:
        """The collective that reduces them."""
        return self._default_comm if self.settings.comm is None else self.settings.comm

    @property
    def unsynced(self) -> bool:
        """Whether there are gradients of successful backwards that are not reduced yet."""
        return self.accumulation.unsynced or self.strategy.unsynced

    @property
    def synced(self) -> tuple[bool, bool]:
        """Whether a backward reduces now, and whether its reductions give gradients."""
        return self.accumulation.reduces, self.strategy.gives_gradients

    @contextmanager
    def synced_as(self, synced: tuple[bool, bool]) -> Iterator[None]:
        """Reduce in the block as when ``synced`` was read."""
        accumulation, strategy = self.accumulation, self.strategy
        now = accumulation.synchronises, accumulation.waits_for_last, strategy.gives_gradients
        reduces, strategy.gives_gradients = synced
        accumulation.synchronises, accumulation.waits_for_last = reduces, not reduces
        try:
            yield
        finally:
            accumulation.synchronises, accumulation.waits_for_last, strategy.gives_gradients = now

    def pop_ready(self, *, reduce: bool) -> ReadyReductions:
        """Return the reductions to launch now: none if it is not time, or synchronisation is off.

        There is one per reduce dtype, unless they wait for their neighbours. Gradients that stay
        behind are kept in the reduce dtype. The reductions contain all parameters that require a
        gradient now, with or without a gradient on this rank: their sizes must not depend on what
        one rank happened to use.

        Args:
            reduce: whether it is time.
        """
        if not (reduce and self.accumulation.reduces):
            if not self.accumulation.survives_errors:  # else once backward ended without an error
                self.accumulation.stash()
            return ()
        self.reduced = True
        self.in_unsynced_backward = False
        gradients, trainable = self.accumulation.pop_grads()
        setups = self._setups.get(trainable)
        if setups is None:
            setups = self._set_up(trainable)
        self.reductions += len(setups)
        ready: ReadyReductions
        if len(setups) == 1 and len(setups[0].indices) == len(gradients):
            ready = ((setups[0], gradients),)  # as most are
        else:
            ready = [(each, [gradients[index] for index in each.indices]) for each in setups]
        return ready if self.bucket is None else self.bucket.put(ready, self.settings.cap_mb)

    def _set_up(self, trainable: tuple[bool, ...]) -> Sequence[ReductionSetup]:
        """Return how ``trainable`` parameters are reduced; cached while the settings stay.

        There is a reduction per reduce dtype.
        """
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, param in enumerate(self.params):
            if trainable[index]:
                by_dtype.setdefault(param.reduce_dtype, []).append(index)
        setups = tuple([self._setup(dtype, tuple(found)) for dtype, found in by_dtype.items()])
        if not isinstance(self.settings.divide_factor, torch.Tensor):  # that may be another soon
            self._setups[trainable] = setups
        return setups

    def _setup(self, dtype: torch.dtype, indices: tuple[int, ...]) -> ReductionSetup:
        settings, mesh_info = self.settings, self.mesh_info
        params = tuple([self.params[index] for index in indices])
        scaling = reduction_scaling(
            mesh_info.data_parallel_size,
            dtype,
            averages=all(backend_averages(each, dtype) for each in mesh_info.process_groups),
            divide_factor=settings.divide_factor,
            force_sum=settings.force_sum,
        )
        config = ReduceConfig(
            comm=self.comm,
            process_group=settings.process_group,
            streams=self._shared.streams,
            device=self.device,
            scaling=replace(scaling, post=1.0) if self.strategy.has_second_reduction else scaling,
            name=self.name,
            inputs_in_flight=settings.inputs_in_flight,
            source=self._shared.source,
        )
        ends_here = settings.hook is None and not self.strategy.has_second_reduction
        alone = config.collective.offers.aliases_input(config.process_group)
        aliases = ends_here and alone and scaling.is_identity
        varies = isinstance(settings.divide_factor, torch.Tensor)
        alike = settings.comm is None and not settings.zero_unused and not varies
        return ReductionSetup(
            names=(self.name,),
            rank=mesh_info.shard_rank,
            indices=indices,
            params=params,
            layout=rank_major(
                tuple([p.grad_spec for p in params]), mesh_info.shard_world_size, len(indices)
            ),
            config=config,
            wire=self._wire,
            scaling=scaling,
            strategy=AliasReduce() if aliases else self.strategy,
            settings=settings,
            coalesces=ends_here and alike and settings.cap_mb > 0,
        )

    def end_of_backward(self) -> str:
        """Reset the state of the group after a successful backward, whose reductions are launched.

        Returns:
            An error message if a parameter received a gradient after its group was reduced, or an
            empty string. The other groups end first, as on ranks without an error.
        """
        waiting, late = self.accumulation.end_of_backward(), ""
        if waiting and self.reduced and not self.grads_after_reduce:
            late = ", ".join(self.accumulation.names)
            self.accumulation.stash()
        self.in_unsynced_backward |= self.in_backward and not self.reduced
        if self.strategy.has_second_reduction:
            self.strategy.end_of_backward()
        self.in_backward = self.unannounced = self.reduced = self.grads_after_reduce = False
        return late and (
            f"{late} received a gradient after parameter group {self.name!r} had been "
            "reduced, so the sharded gradient lacks it; give the module's inputs a path to every "
            "output that is used, or shard the part that has none by itself; under torch.autocast, "
            "which caches casts of parameters, use one region per call, or cache_enabled=False"
        )

    def leave_backward(self) -> None:
        """Note a backward that ended well, but that ``finalize_backward`` is to finish.

        A gradient that arrived after the reduction of the group is an error, which that raises.
        """
        late, unannounced = self.grads_after_reduce, self.unannounced
        if self.reduced and not late and self.accumulation.waiting:
            return
        self.end_of_backward()
        self.in_unsynced_backward |= late
        self.unannounced = unannounced

    def abandon(self) -> bool:
        """Drop the gradients of an unfinished backward; return whether others were lost too.

        Other gradients are from successful backwards without communication; they stay if the
        accumulation keeps them.
        """
        keep = self.accumulation.survives_errors
        lost = self.unsynced and not keep
        self.in_unsynced_backward &= keep
        self.accumulation.abandon(keep=keep)
        self.strategy.abandon(keep=keep)
        self.in_backward = self.unannounced = self.reduced = self.grads_after_reduce = False
        return lost

    def forget(self) -> None:
        """Drop every unsharded gradient: the parameters were replaced."""
        self.accumulation.abandon(keep=False)
        self.in_unsynced_backward = False
        self._setups.clear()
        if self.bucket is not None:
            self.bucket.forget()
        self.strategy.abandon(keep=False)
