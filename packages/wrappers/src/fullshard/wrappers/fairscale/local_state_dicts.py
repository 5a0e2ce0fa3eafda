"""Whole weights out of every rank's ``local_state_dict()``, without ranks or a model.

Defines FairScale's metadata format. Reads flat tensors that FairScale saved, and rows of parameters
that this package saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["consolidated", "local_metadata"]


def local_metadata(
    wrappers: Mapping[str, Mapping[str, nn.Parameter]], buffers: Sequence[str]
) -> dict[str, Any]:
    """Return the metadata that ``consolidated`` needs in addition to a rank's local state dict.

    Args:
        wrappers: the own parameters of each wrapper, by path and by name below it.
        buffers: the names of all buffers.
    """
    found = [
        {
            "fsdp_path": path,
            "params": {
                name: {
                    "names": [name],
                    "shapes": [param.shape],
                    "numels": [param.numel()],
                    "padding": 0,
                }
                for name, param in params.items()
            },
            "no_broadcast_optim_state": False,
            "shared_param_info": [],
        }
        for path, params in wrappers.items()
    ]
    return {"param_metadata": found, "buffer_names": list(buffers)}


def consolidated(
    shard_weights: Sequence[Mapping[str, torch.Tensor]],
    shard_metadata: Sequence[Mapping[str, Any]],
    with_module_buffers: bool = True,
    strict: bool = True,
) -> dict[str, torch.Tensor]:
    """Return whole weights by name, of every rank's local state dict and metadata.

    Args:
        shard_weights: ``local_state_dict()`` of each rank, in rank order.
        shard_metadata: ``local_metadata_dict()`` of each.
        with_module_buffers: also buffers, those of the first rank.
        strict: every name of the metadata must be there; else those that are not are left out.

    Raises:
        KeyError: if a name is missing, unless ``strict`` is False.
        ValueError: if the lists are empty or of different lengths, or parts do not fit together.
    """
    if not shard_weights or len(shard_weights) != len(shard_metadata):
        raise ValueError(
            f"consolidate_shard_weights got {len(shard_weights)} state dicts and "
            f"{len(shard_metadata)} metadata; pass one of each for every rank, in rank order"
        )
    whole: dict[str, torch.Tensor] = {}
    for index, instance in enumerate(shard_metadata[0]["param_metadata"]):
        for name in instance["params"]:
            key = _joined(instance["fsdp_path"], name)
            if key not in shard_weights[0] and not strict:
                continue
            of_ranks = [each["param_metadata"][index]["params"][name] for each in shard_metadata]
            if instance["no_broadcast_optim_state"]:
                of_ranks = of_ranks[:1]  # every rank has its own
            parts = [
                _without_padding(weights[key], said["padding"])
                for weights, said in zip(shard_weights, of_ranks, strict=False)
            ]
            for inner, tensor in _split(key, parts, of_ranks[0]):
                whole[_joined(instance["fsdp_path"], inner)] = tensor
    for instance in shard_metadata[0]["param_metadata"]:
        for source, target in instance["shared_param_info"]:
            whole[target] = whole[source]
    for name in shard_metadata[0]["buffer_names"] if with_module_buffers else ():
        if strict or name in shard_weights[0]:
            whole[name] = shard_weights[0][name]
    return whole


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _without_padding(part: torch.Tensor, padding: int) -> torch.Tensor:
    return part.reshape(-1)[: part.numel() - padding]


def _split(
    key: str, parts: Sequence[torch.Tensor], said: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that the parts of ``key`` hold one after the other."""
    names, shapes, numels = said["names"], said["shapes"], said["numels"]
    if shapes == [torch.Size(())]:  # every rank has the whole tensor
        parts = parts[:1]
    joined = torch.cat(list(parts))
    if joined.numel() != sum(numels):
        raise ValueError(
            f"{key} has {joined.numel()} elements over all ranks, and its metadata says "
            f"{sum(numels)}; pass the state dicts and metadata of one save, of all its ranks"
        )
    for name, shape, part in zip(names, shapes, joined.split(numels), strict=True):
        yield name, part.view(shape)
