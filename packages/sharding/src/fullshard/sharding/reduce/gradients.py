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

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from fullshard.comm import (
    ReduceConfig,
    ReduceScatter,
    default_reduce_scatter,
    reduction_scaling,
)
from fullshard.comm.spi import backend_averages, coalesced_cap_mb, rank_major
from fullshard.sharding.base.compat import gradients_of, without_torch_function
from fullshard.sharding.mesh.mesh_info import HSDPMeshInfo, TwoLevelMeshInfo
from fullshard.sharding.mesh.placements import Accumulate
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.protocols import WireForms
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


_requires_grad = attrgetter("requires_grad")
_NEVER = nn.Parameter(torch.empty(0), requires_grad=False)  # has no gradient


class Accumulation:
    """The gradients of a group that no reduction has taken: what autograd left, and sums.

    Attributes:
        enabled: whether backwards reduce (``set_requires_gradient_sync``).
        keeps: whether gradients of backwards that ended well outlive one that raises.
        unsynced: whether such backwards left any.
        kept: by parameter the sum in the reduce dtype, apart from what autograd adds to.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        """Start with none."""
        self.enabled = True
        self.keeps = False
        self.unsynced = False
        self.kept: dict[FSDPParam, torch.Tensor] = {}
        self._params = params
        self._saved: dict[FSDPParam, torch.Tensor] = {}  # kept ones that were taken, to put back
        self._generation = params[0].generation
        self._replacements = -1
        self._own: list[nn.Parameter] = []
        self._full: list[nn.Parameter] = []
        self._whole = all(param.sharding.travels_whole for param in params)

    def _look(self) -> None:
        """Find sharded and unsharded parameters; one that was never gathered has no gradient."""
        if self._replacements != self._generation.replacements:
            self._replacements = self._generation.replacements
            self._own = [param.sharded for param in self._params]
            both = zip(self._params, self._own, strict=True)
            self._full = [_NEVER if p.unsharded is own else p.unsharded for p, own in both]

    @property
    def waiting(self) -> bool:
        """Whether any gradient is there."""
        self._look()
        return bool(self.kept) or not all(map(is_, gradients_of(self._full), repeat(None)))

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Of each parameter, whether it requires a gradient now."""
        self._look()
        with without_torch_function():
            return tuple(map(_requires_grad, self._own))

    @property
    def names(self) -> list[str]:
        """The names of the parameters of which there is one."""
        params = self._params
        return [p.name for p in params if p in self.kept or p.autograd_grad is not None]

    def stash(self) -> None:
        """Move autograd's gradients into the sums.

        If autograd's dtype is the reduce dtype, the gradient stays in place, because autograd adds
        further gradients to it; unless it is to outlive a backward that raises.
        """
        for param in self._params:
            left = param.autograd_grad
            if left is None:
                continue
            if self.keeps or param in self.kept or left.dtype != param.reduce_dtype:
                self.set_grad(param, self.take_of(param))

    def pop_grads(self) -> list[torch.Tensor | None]:
        """Return and remove the gradient of each parameter since the last reduction."""
        if not self.kept:
            self._look()
            found = gradients_of(self._full)
            with without_torch_function():
                for unsharded in self._full:
                    unsharded.grad = None
            dense = torch.strided if self._whole else None
            # looks at no parameter where none has a say: that would cost more than all the rest
            for at, left in enumerate(found):
                if left is not None and (left.layout is not dense or left.requires_grad):
                    found[at] = self._params[at].to_reduce(left)
            return found
        if self.keeps:
            self._saved = {**self.kept, **self._saved}
        return [self.take_of(param) for param in self._params]

    def take_of(self, param: FSDPParam) -> torch.Tensor | None:
        """Return the gradient of a parameter and remove it."""
        total, left = self.kept.pop(param, None), param.autograd_grad
        param.drop_gradient()
        gradient = None if left is None else param.to_reduce(left)
        if total is None:
            return gradient
        if param in self._saved:
            total = total.clone()
        return total if gradient is None else total.add_(gradient)

    def set_grad(self, param: FSDPParam, total: torch.Tensor | None) -> None:
        """Replace the gradient of ``param`` by ``total``, which came from ``take_of``."""
        param.drop_gradient()
        self.kept.pop(param, None)
        if total is not None:
            self.kept[param] = total.to(param.reduce_dtype)

    def end_of_backward(self, *, waiting: bool) -> None:
        """Note a successful backward; ``waiting``: whether it left gradients."""
        self.unsynced = waiting
        self._saved.clear()
        if self.keeps and waiting:
            self.stash()

    def abandon(self, *, keep: bool) -> None:
        """Drop the gradients of an unfinished backward, and the sums if not ``keep``."""
        self.kept = {**self.kept, **self._saved} if keep else {}
        self.unsynced = self.unsynced and keep
        self._saved.clear()
        for param in self._params:
            param.drop_gradient()


class GroupGradients:
    """The gradients of one group.

    Attributes:
        name: the group's, for messages and events.
        settings: what users set; see ``change``.
        replicas: what follows a reduce-scatter.
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
        self.accumulate = Accumulate.ALL
        self._shared = shared
        self._default_comm = default_reduce_scatter(mesh_info.shard_process_group)
        self.settings = ReduceSettings(
            process_group=mesh_info.shard_process_group,
            cap_mb=coalesced_cap_mb(mesh_info.shard_world_size),
        )
        self.replicas = PlainReduce()
        if isinstance(mesh_info, TwoLevelMeshInfo):
            self.replicas = TwoLevelReduce(mesh_info.replicate_process_group)
        elif isinstance(mesh_info, HSDPMeshInfo):
            self.replicas = HybridReduce(mesh_info.replicate_process_group)
        self._setups: dict[tuple[bool, ...], Sequence[ReductionSetup]] = {}

    def announce_last(self, is_last: bool) -> None:
        """Note whether the next backward is the last of a step; others reduce less if so asked."""
        if self.accumulate is Accumulate.NONE:
            self.accumulation.enabled = is_last
        elif self.accumulate is Accumulate.FIRST:
            self.replicas.synchronise(is_last)

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
        return self.accumulation.unsynced or self.replicas.unsynced

    @property
    def is_set_up(self) -> bool:
        """Whether it reduced since parameters or settings changed."""
        return bool(self._setups)

    def pop_ready(self, *, reduce: bool) -> ReadyReductions:
        """Return the reductions to launch now: none if it is not time, or synchronisation is off.

        There is one per reduce dtype, unless they wait for their neighbours. Gradients that stay
        behind are kept in the reduce dtype. The reductions contain all parameters that require a
        gradient now, with or without a gradient on this rank: their sizes must not depend on what
        one rank happened to use.

        Args:
            reduce: whether it is time.
        """
        if not (reduce and self.accumulation.enabled):
            if not self.accumulation.keeps:  # else at the end of backward, which may raise
                self.accumulation.stash()
            return ()
        self.reduced = True
        self.in_unsynced_backward = False
        gradients = self.accumulation.pop_grads()
        trainable = self.accumulation.trainable
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
            scaling=replace(scaling, post=1.0) if self.replicas.has_all_reduce else scaling,
            name=self.name,
            inputs_in_flight=settings.max_inputs,
            source=self._shared.source,
        )
        ends_here = settings.hook is None and not self.replicas.has_all_reduce
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
            strategy=AliasReduce() if aliases else self.replicas,
            settings=settings,
            coalesces=ends_here and alike and settings.cap_mb > 0,
        )

    def end_of_backward(self) -> str:
        """Reset the state of the group after a successful backward, whose reductions are launched.

        Returns:
            An error message if a parameter received a gradient after its group was reduced, or an
            empty string. The other groups end first, as on ranks without an error.
        """
        waiting = self.accumulation.waiting
        done = self.reduced and not self.grads_after_reduce
        late = ", ".join(self.accumulation.names) if done and waiting else ""
        if late:
            self.accumulation.stash()
        self.accumulation.end_of_backward(waiting=waiting)
        self.in_unsynced_backward |= self.in_backward and not self.reduced
        if self.replicas.has_all_reduce:
            self.replicas.end_of_backward()
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
        keep = self.accumulation.keeps
        lost = self.unsynced and not keep
        self.in_unsynced_backward &= keep
        self.accumulation.abandon(keep=keep)
        self.replicas.abandon(keep=keep)
        self.in_backward = self.unannounced = self.reduced = self.grads_after_reduce = False
        return lost

    def forget(self) -> None:
        """Drop every unsharded gradient: the parameters were replaced."""
        self.accumulation.abandon(keep=False)
        self.in_unsynced_backward = False
        self._setups.clear()
        if self.bucket is not None:
            self.bucket.forget()
        self.replicas.abandon(keep=False)
