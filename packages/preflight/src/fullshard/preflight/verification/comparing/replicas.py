"""Compares what several ranks hold of the same shard: replicas of a mesh, and whole tensors.

A rank sends a digest of its copies, so equal copies cost no more. Owns which ranks hold the same
shard. ``Comparison`` decides the allowed difference between copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.preflight.verification.agree import everyones
from fullshard.preflight.verification.comparing.compare import Comparison
from fullshard.preflight.verification.comparing.tensors import digest, local
from fullshard.preflight.verification.verdict import Phase

__all__ = ["compare_replicas", "differing"]

_MOST = 8
"""Tensors that are compared by value; of more that differ, the others are only counted."""


def compare_replicas(
    comparison: Comparison, phase: Phase, tensors: Mapping[str, torch.Tensor | None]
) -> None:
    """Compare the ranks' copies of each shard with the first; all ranks call it."""
    held = {name: each for name, each in tensors.items() if each is not None}
    wrong = differing(held)
    for name in list(wrong)[:_MOST]:
        copies: list[Any] = everyones(local(held[name]).cpu() if name in held else None)
        shards = [{rank: copies[rank] for rank in ranks} for ranks in wrong[name]]
        comparison.replicas(phase, name, shards)


def differing(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[list[int]]]:
    """Return the tensors with copies that differ, each with the ranks of the same shard.

    The same on all ranks, which all call it.
    """
    mine = {
        name: (_place(each), digest(local(each)))
        for name, each in tensors.items()
        if not isinstance(each, DTensor) or _is_replicated(each)
    }
    ranks = everyones(mine)
    found: dict[str, list[list[int]]] = {}
    for name in dict.fromkeys(name for told in ranks for name in told):
        holders: dict[object, list[int]] = {}
        for rank, told in enumerate(ranks):
            if name in told:
                holders.setdefault(told[name][0], []).append(rank)
        apart = [
            each for each in holders.values() if len({ranks[rank][name][1] for rank in each}) > 1
        ]
        if apart:
            found[name] = apart
    return found


def _is_replicated(tensor: DTensor) -> bool:
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(each.is_replicate() and size > 1 for each, size in sizes)


def _place(tensor: torch.Tensor) -> object:
    """Return a key that is equal on two ranks with equal shards of a tensor."""
    if not isinstance(tensor, DTensor):
        return "whole"
    where = tensor.device_mesh.get_coordinate() or ()
    shard = [
        place
        for place, each in zip(where, tensor.placements, strict=True)
        if not each.is_replicate()
    ]
    return tuple(tensor.device_mesh.mesh.flatten().tolist()), tuple(shard)
