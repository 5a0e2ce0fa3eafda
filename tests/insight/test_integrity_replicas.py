"""Each parameter is compared over the replicas of its own mesh, and over no other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.insight import DamagedNumbersError, IntegrityChecks, IntegrityPolicy
from fullshard.sharding import DataParallelMeshDims, ShardingPlacements, fully_shard, replicate
from fullshard.sharding.spi import local_shard
from support.ranks import cpu_mesh, distributed

STRUCK = 2


def _hsdp_below_zero_3(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh, placements=ShardingPlacements.zero(3))


def _replicated_beside_sharded(model: Any, mesh: DeviceMesh) -> None:
    replicate(model[0], mesh=cpu_mesh((4,), ("all",)))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh, placements=ShardingPlacements.zero(3))


def _each_axis_replicates(model: Any, mesh: DeviceMesh) -> None:
    axes = [DataParallelMeshDims("inner", "outer"), DataParallelMeshDims("outer", "inner")]
    for module, dims in zip(model, axes, strict=False):
        fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    replicate(model[2], mesh=mesh["outer"])


def _a_plain_module_beside(model: Any, mesh: DeviceMesh) -> None:
    fully_shard(model[1], mesh=mesh)  # gradients of the others stay on their rank


MIXES: dict[str, tuple[Callable[[Any, DeviceMesh], None], dict[str, set[int]]]] = {
    "HSDP below ZeRO-3": (_hsdp_below_zero_3, {"0": {0, 2}}),
    "replicated beside sharded": (_replicated_beside_sharded, {"0": {2}, "1": {0, 2}}),
    "each axis replicates": (_each_axis_replicates, {"0": {0, 2}, "1": {2, 3}, "2": {0, 2}}),
    "a plain module beside": (_a_plain_module_beside, {"1": {0, 2}}),
}
"""How three layers are sharded; by layer with replicas, the ranks that a finding names.

Of two replicas that differ, either may be the damaged one; of four, one has the rarest bits.
"""


@torch.no_grad()
def _flip(model: nn.Module, name: str) -> None:
    """Flip a bit of a parameter on one rank; a second call puts it back."""
    if dist.get_rank() == STRUCK:
        local_shard(dict(model.named_parameters())[name]).view(-1).view(torch.int32)[:1] ^= 1


@pytest.mark.parametrize("mix", MIXES)
@distributed(4)
def test_parameters_of_several_meshes_are_compared_over_their_own_replicas(mix: str) -> None:
    shard, replicated = MIXES[mix]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    shard(model, cpu_mesh((2, 2), ("outer", "inner")))
    optimizer = torch.optim.AdamW(model.parameters())
    checks = IntegrityChecks(model, optimizer, IntegrityPolicy(every=1, at_rest=False))

    def step(struck: str = "") -> None:
        checks.begin()
        model(torch.full((3, 4), 1.0 + dist.get_rank())).square().mean().backward()
        checks.before_update()
        optimizer.step()
        optimizer.zero_grad()
        if struck:
            _flip(model, struck)
        checks.end()

    step()
    step()  # nothing is damaged
    for layer, ranks in replicated.items():
        for name in (f"{layer}.weight", f"{layer}.bias"):
            with pytest.raises(DamagedNumbersError) as raised:
                step(struck=name)
            (finding,) = raised.value.findings
            found = finding.stage, finding.tensor, set(finding.ranks)
            assert found == ("replicas", name, ranks)
            _flip(model, name)
            step()
