"""How the gradients of a group are reduced: what users set, and the reductions made of it.

Owns the settings, the strategy, and one set-up for each choice of parameters that are trained.
Set-ups stay as long as the settings do, so a step makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import (
    Layout,
    ReduceConfig,
    ReduceScatter,
    TensorSpec,
    default_reduce_scatter,
    reduction_scaling,
)
from fullshard.comm.spi import ReducePlan, backend_averages, rank_major
from fullshard.sharding.mesh.mesh_info import HSDPMeshInfo, TwoLevelMeshInfo
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.protocols import WireForms
from fullshard.sharding.reduce.reduction import RootComm
from fullshard.sharding.reduce.strategies import (
    AliasReduce,
    PlainReduce,
    ReduceSettings,
    ReductionSetup,
    TwoReductions,
)

__all__ = ["ReductionSetups"]


class ReductionSetups:
    """The reductions of one group, per choice of trained parameters.

    Attributes:
        name: the group's, for messages and events.
        settings: what users set; see ``change``.
        strategy: how the group reduces; see [Note: reduce strategies].
    """

    def __init__(
        self, params: Sequence[FSDPParam], device: torch.device, shared: RootComm, wire: WireForms
    ) -> None:
        """Start with the settings of the mesh of ``params``."""
        self.name = ""
        self._wire = wire
        self.params = params
        self.mesh_info = mesh_info = params[0].mesh_info
        self.device = device
        self._shared = shared
        self._default_comm = default_reduce_scatter(mesh_info.shard_process_group)
        self.settings = ReduceSettings(process_group=mesh_info.shard_process_group)
        self.strategy = PlainReduce()
        if isinstance(mesh_info, TwoLevelMeshInfo):
            self.strategy = TwoReductions(mesh_info.second.shard_process_group)
        elif isinstance(mesh_info, HSDPMeshInfo):
            self.strategy = TwoReductions(mesh_info.replicate_process_group)
        self._setups: dict[tuple[bool, ...], Sequence[ReductionSetup]] = {}

    def share(self, shared: RootComm) -> None:
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

    def forget(self) -> None:
        """Make the reductions again: dtypes or parameters changed."""
        self._setups.clear()

    def of(self, trainable: tuple[bool, ...]) -> Sequence[ReductionSetup]:
        """Return how ``trainable`` parameters are reduced: a reduction per reduce dtype.

        The reductions are kept while the settings stay.
        """
        setups = self._setups.get(trainable)
        return self._made(trainable) if setups is None else setups

    def _made(self, trainable: tuple[bool, ...]) -> Sequence[ReductionSetup]:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, param in enumerate(self.params):
            if trainable[index]:
                by_dtype.setdefault(param.reduce_dtype, []).append(index)
        setups = tuple([self._make_setup(dtype, tuple(found)) for dtype, found in by_dtype.items()])
        if not isinstance(self.settings.divide_factor, torch.Tensor):  # that may be another soon
            self._setups[trainable] = setups
        return setups

    def _make_setup(self, dtype: torch.dtype, indices: tuple[int, ...]) -> ReductionSetup:
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
        layout = rank_major(
            tuple([param.grad_spec for param in params]), mesh_info.shard_world_size, len(indices)
        )
        second = None
        if isinstance(mesh_info, TwoLevelMeshInfo):
            after = replace(config, scaling=replace(scaling, pre=1.0))
            second = _second_plan(mesh_info.second.shard_process_group, params, layout, after)
        return ReductionSetup(
            names=(self.name,),
            rank=mesh_info.shard_rank,
            indices=indices,
            params=params,
            layout=layout,
            config=config,
            wire=self._wire,
            scaling=scaling,
            strategy=AliasReduce() if aliases else self.strategy,
            settings=settings,
            second=second,
        )


def _second_plan(
    process_group: dist.ProcessGroup,
    params: tuple[FSDPParam, ...],
    layout: Layout,
    config: ReduceConfig,
) -> ReducePlan:
    """Return the plan of a reduce-scatter that cuts the result of one of ``layout`` again.

    ``config``: as of the first reduction, but for the scaling.
    """
    dtype, ranks = layout.buffer.dtype, process_group.size()
    mask = TensorSpec(shape=(ranks, layout.mask_numel), dtype=dtype, dim=0)
    specs = tuple([param.sharding.second_cut.spec_in(dtype) for param in params])
    config = replace(
        config,
        comm=default_reduce_scatter(process_group),
        process_group=process_group,
        name=f"{config.name} (second level)",
    )
    return ReducePlan(rank_major((*specs, mask), ranks, 0), config)
