"""Folders of DeepSpeed's ZeRO as its documentation describes them, written without DeepSpeed.

``write_zero`` cuts a state dict as each stage does: one vector for each optimizer group, padded and
cut into equal parts (1 and 2), or each parameter by itself, padded and cut (3). Files also contain
objects of DeepSpeed's classes, as real files do; the classes do not exist when a file is read.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

__all__ = ["write_zero"]


def _cut(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Equal parts of a tensor's elements, the last ones padded."""
    flat = tensor.reshape(-1).float()
    part = -(-flat.numel() // ranks)
    padded = torch.cat([flat, torch.full((part * ranks - flat.numel(),), -7.0)])
    return [each.clone() for each in padded.split(part)]


def write_zero(
    folder: Path,
    groups: Sequence[Mapping[str, torch.Tensor]],
    *,
    stage: int,
    ranks: int,
    buffers: Mapping[str, torch.Tensor],
    frozen: Mapping[str, torch.Tensor],
    shared: Mapping[str, str],
    sub_groups: int = 1,
) -> None:
    """Write a folder with one tag.

    Args:
        folder: a new folder.
        groups: the trained parameters of each optimizer group.
        stage: of ZeRO.
        ranks: of the job.
        buffers: by name.
        frozen: parameters that are not trained.
        shared: second names of tied parameters, and the first name of each.
        sub_groups: into how many flat tensors stage 3 divides a rank's parameters.
    """
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    scaler = _a_class_of_deepspeed("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
    trained = {name: tensor for group in groups for name, tensor in group.items()}
    for rank in range(ranks):
        module = {**buffers, **trained} if stage < 3 else dict(buffers)
        fragments = {
            name: _cut(tensor, ranks)[rank] if stage == 3 else tensor
            for name, tensor in frozen.items()
        }
        state: dict[str, Any] = {
            "module": module,
            "buffer_names": list(buffers),
            "param_shapes": [
                OrderedDict((n, t.shape) for n, t in group.items()) for group in groups
            ],
            "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in frozen.items()),
            "frozen_param_fragments": OrderedDict(fragments),
            "shared_params": dict(shared),
            "ds_version": "0.17.0",
            "ds_config": {"zero_optimization": {"stage": stage}},
        }
        optimizer: dict[str, Any] = {"zero_stage": stage, "loss_scaler": scaler()}
        if stage == 3:
            parts = [_cut(tensor, ranks)[rank] for tensor in trained.values()]
            size = -(-len(parts) // sub_groups)
            flat = [torch.cat(parts[at : at + size]) for at in range(0, len(parts), size)]
            optimizer |= {"partition_count": ranks, "fp32_flat_groups": flat}
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        else:
            vectors = [torch.cat([t.reshape(-1).float() for t in g.values()]) for g in groups]
            flat = [_cut(vector, ranks)[rank] for vector in vectors]
            optimizer |= {
                "partition_count": [ranks] * len(groups),
                "single_partition_of_fp32_groups": flat,
                "base_optimizer_state": {"state": {}},
            }
            name = "mp_rank_00_model_states.pt"
        torch.save(state, tag / name)
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_config": {}},
            tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    for name in _parents(scaler.__module__):
        del sys.modules[name]


def _a_class_of_deepspeed(module: str, name: str) -> type:
    """A class that pickles by a name that exists only until the module is removed again."""
    for each in _parents(module):
        sys.modules[each] = ModuleType(each)
    found = type(name, (), {"__module__": module})
    setattr(sys.modules[module], name, found)
    return found


def _parents(module: str) -> list[str]:
    """The dotted name, and the names above it."""
    return list(itertools.accumulate(module.split("."), "{}.{}".format))
