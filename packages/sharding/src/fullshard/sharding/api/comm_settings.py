"""Settings of a sharded module's collectives, under torch's names.

Owns the setters that choose how bytes move and the checks of their arguments. ``FSDPModule``
inherits them. None communicates, but ``set_separate_reduce_scatter_group``, which makes a process
group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import (
    AllGather,
    Allocator,
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupAllocator,
    ReduceScatter,
    SymmetricMemoryAllocator,
)
from fullshard.comm.spi import require as require_methods
from fullshard.sharding.base.checks import (
    require_bool,
    require_count,
    require_divide_factor,
)
from fullshard.sharding.base.compat import untraced
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.lookup import groups_of, the_root, the_state
from fullshard.sharding.hooks.schedule import SCHEDULES, Schedule
from fullshard.sharding.mesh.subgroups import new_subgroup

__all__ = ["CommSettings"]


@untraced
class CommSettings:
    """The settings of a sharded module for collectives."""

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's parameters through ``comm``. Not recursive.

        Raises:
            TypeError: naming the methods that ``comm`` lacks.
        """
        require_methods(AllGather, comm)
        for group in groups_of(self):
            group.gathering.set_comm(comm)

    def set_schedule(self, schedule: Schedule | None) -> None:
        """Let ``schedule`` decide when the groups under this root are gathered and reduced.

        Call it on the root, on all ranks alike.

        Args:
            schedule: one of this root's own, such as ``fullshard.policies.CanonicalOrder()``; None:
                the default, which communicates as modules run.

        Raises:
            TypeError: if it is no ``Schedule``.
            ValueError: if the schedule belongs to another root; or if it allows no kept groups, and
                a group keeps full parameters within a step or shards over a post-forward mesh.
            RuntimeError: if this module is not the root, or is in the middle of a step.
        """
        if not isinstance(schedule, Schedule | None):
            raise TypeError(
                f"schedule is a {type(schedule).__name__}; pass a fullshard.sharding.Schedule, "
                "such as fullshard.policies.CanonicalOrder(), or None for the default"
            )
        context = the_root(self, "set_schedule").context
        chosen = schedule or SCHEDULES[-1]()
        kept = [
            group.name
            for group in context.groups
            if group.gathering.setup.post_forward_size or group.gathering.keeps_full
        ]
        if kept and not chosen.allows_kept_groups:
            raise ValueError(
                f"{', '.join(kept)} keep full parameters within a step, or shards over a "
                f"post-forward mesh, which {type(chosen).__name__} does not allow; pass "
                "reshard_after_forward=True, and placements without compute=(), for example "
                "ShardingPlacements(gradients=())"
            )
        context.use_schedule(chosen)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this module's gradients through ``comm``. Not recursive.

        Raises:
            TypeError: naming the methods that ``comm`` lacks.
        """
        require_methods(ReduceScatter, comm)
        _reduce_with(self, False, comm=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take the buffers of collectives from the process group's own memory. Not recursive.

        Args:
            enable: whether to; False goes back to the caching allocator.

        Raises:
            TypeError: if ``enable`` is not a bool.
            ValueError: if a custom collective was set, or, at the first collective, if the backend
                does not allocate.
        """
        require_bool("enable", enable)
        for group in groups_of(self):
            _require_default(group, "set_allocate_memory_from_process_group_for_comm")
            process_group = group.mesh_info.shard_process_group
            if enable:
                _allocate_by(group, ProcessGroupAllocator(process_group), reductions=True)
            else:
                group.gathering.set_comm(group.policies.wire.all_gather(process_group))
                group.gradients.setups.change(comm=None)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Take gather buffers from symmetric memory; reduction buffers too if only sums are asked.

        Not recursive. Not measured: it needs several GPUs on one node.

        Args:
            backend: "NCCL", the only one.

        Raises:
            ValueError: for another backend, if a custom collective was set, or if the module does
                not compute on CUDA.
        """
        if backend != "NCCL":
            raise ValueError(f"backend is {backend!r}; the only one is 'NCCL'")
        for group in groups_of(self):
            _require_default(group, "set_symm_mem_for_comm")
            if group.device.type != "cuda":
                raise ValueError(
                    f"set_symm_mem_for_comm() needs CUDA, but {group.name or 'the module'} "
                    f"computes on {group.device}"
                )
            allocator = SymmetricMemoryAllocator(group.mesh_info.shard_process_group)
            _allocate_by(group, allocator, reductions=group.gradients.setups.settings.force_sum)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Ask the backend for sums only, scaled by ourselves. Not recursive.

        Raises:
            TypeError: if ``enable`` is not a bool.
        """
        require_bool("enable", enable)
        _reduce_with(self, False, force_sum=enable)

    def set_gradient_divide_factor(self, factor: float | torch.Tensor) -> None:
        """Divide this module's summed gradients by ``factor`` instead of the number of ranks.

        Not recursive.

        Args:
            factor: a positive number; or a 0-d tensor on the module's device, equal on all ranks,
                such as the number of tokens in all ranks' batches. A tensor is read on the device
                at each reduction, without a wait of the host: update it in place, or set another.

        Raises:
            TypeError: if it is neither.
            ValueError: if a number is not finite and positive, or a tensor not 0-d or on another
                device.
        """
        require_divide_factor(factor, the_state(self).device)
        _reduce_with(self, False, divide_factor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float | torch.Tensor) -> None:
        """Do what ``set_gradient_divide_factor`` does; torch deprecated this name."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Give a parameter that no rank used a gradient of zeros instead of none.

        Ranks may use different parameters either way: reductions have a fixed layout.

        Args:
            reduce_scatter_unused_params: whether to.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
        """
        require_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        _reduce_with(self, recurse, zero_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many packed reduction inputs may be alive at once; 1 by default.

        More overlap for more memory. Of several values under a root, the largest holds.

        Args:
            max_input_buffers: at least 1.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if it is not an int.
            ValueError: if it is not positive.
        """
        require_count("max_input_buffers", max_input_buffers)
        _reduce_with(self, recurse, inputs_in_flight=max_input_buffers)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce over a process group of its own, so that gathers and reductions can overlap.

        Collective over the ranks of each shard group: call it on all of them alike. The effect on
        NCCL is not measured.

        Args:
            enable: whether to; False goes back to the group that gathers use.
            recurse: set it for all sharded modules below, too.

        Raises:
            TypeError: if an argument is not a bool.
            RuntimeError: on all ranks, if they are in different numbers of process groups.
        """
        require_bool("enable", enable)
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in groups_of(self, recurse):
            chosen = shared = group.mesh_info.shard_process_group
            if enable:
                ranks = tuple(dist.get_process_group_ranks(shared))
                if ranks not in made:
                    made[ranks] = new_subgroup(ranks, shared, group.device)
                chosen = made[ranks]
            group.gradients.setups.change(process_group=chosen)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Call ``hook`` with each reduced flat buffer, to go on reducing it in place.

        Not recursive. The buffer holds this rank's slice of every gradient of the group in the
        reduce dtype, and behind them the used-parameter mask: a number per parameter, positive if
        any rank used it; a sum or an average keeps it so.

        Args:
            hook: changes the buffer in place.
            stream: the accelerator stream to run it on; None: the all-reduce stream.

        Raises:
            TypeError: if ``hook`` is not callable.
        """
        if not callable(hook):
            raise TypeError(
                f"hook is a {type(hook).__name__}; pass a function of the reduced buffer"
            )
        _reduce_with(self, False, hook=hook, hook_stream=stream)


def _reduce_with(module: object, recurse: bool, **settings: Any) -> None:
    for group in groups_of(module, recurse):
        group.gradients.setups.change(**settings)


def _allocate_by(group: FSDPParamGroup, allocator: Allocator, *, reductions: bool) -> None:
    group.gathering.set_comm(DefaultAllGather(allocator=allocator))
    if reductions:
        group.gradients.setups.change(comm=DefaultReduceScatter(allocator=allocator))


def _require_default(group: FSDPParamGroup, call: str) -> None:
    comms = (group.gathering.config.comm, group.gradients.setups.comm)
    if not isinstance(comms[0], DefaultAllGather) or not isinstance(comms[1], DefaultReduceScatter):
        raise ValueError(
            f"{call}() chooses where the default collectives allocate, but "
            f"{group.name or 'the module'} has a custom one; let its allocate() choose"
        )
