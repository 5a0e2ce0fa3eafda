"""The state that a joining group receives: its export from shards, and its loading.

Owns the export (a copy of this rank's shards, in host memory, that unshards nothing), a plan of
which parts a rank needs, and the load. A value that is cut like a parameter is a ``DTensor`` and is
cut again for the receiver; other tensors are whole on every rank. Refuses: moving anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from fullshard.checkpoint import (
    flatten_sharded_optim_state_dict,
    sharded_optim_state_dict,
    snapshot,
)
from fullshard.checkpoint.spi import Box, as_cut, box_here
from fullshard.elastic.errors import ReplicaGroupError
from fullshard.sharding import FSDPModule
from fullshard.sharding.spi import groups_of, local_shard, sharded_of, spec_of

__all__ = ["ReplicaState", "Stateful", "Tensors"]

Tensors = list[tuple[torch.Tensor, Box]]
"""Tensors of one rank in a fixed order, each with the part of the whole tensor that it is."""


class Stateful(Protocol):
    """A learning-rate scheduler, a data loader: anything with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which can be pickled."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state."""


class _Slot:
    """Stands for a tensor in a structure: its index, dtype and shape, and whether it is cut."""

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        self.index = index
        self.dtype = tensor.dtype
        self.shape = tuple(tensor.shape)
        self.is_cut = isinstance(tensor, DTensor)


class ReplicaState:
    """The state of a replica group on this rank.

    Args:
        model: sharded.
        optimizer: of its parameters.
        others: by name what has a state, too.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, others: Mapping[str, Stateful]
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._others = dict(others)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._params: dict[str, torch.Tensor] = {}
        self.look()

    def look(self) -> None:
        """Find the sharded parameters, also in a step, in which modules hold others."""
        named = self._model.named_parameters(remove_duplicate=False)
        self._params = {name: sharded_of(param) for name, param in named}

    def digest(self) -> str:
        """Return a digest of what is equal in all groups: parameters, sharded modules, names."""
        found = [
            (name, tuple(param.shape), str(param.dtype), param.requires_grad)
            for name, param in self._model.named_parameters()
        ]
        sharded = [n for n, m in self._model.named_modules() if isinstance(m, FSDPModule)]
        text = repr((found, sharded, sorted(self._others)))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def mesh(self, process_group: dist.ProcessGroup | None) -> str:
        """Return the ranks that sharded modules are cut over; empty if all, once and in order.

        Slices of such groups can be cut again for any number of ranks. A mesh of several axes gives
        slices that only a group with an equal mesh has.
        """
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        found: dict[str, None] = {}
        for module in self._model.modules():
            for group in groups_of(module) if isinstance(module, FSDPModule) else ():
                mesh = group.mesh_info.mesh
                places = [ranks.index(rank) for rank in mesh.mesh.flatten().tolist()]
                cut = group.mesh_info.placements(0)
                whole = places == list(range(len(ranks))) and cut == (Shard(0),)
                text = "" if whole else f"ranks {places} as {tuple(mesh.shape)}, {cut}"
                found[text] = None
        return "; ".join(found)

    @torch.no_grad()
    def export(self) -> tuple[Any, Tensors]:
        """Return the structure of the state and a copy of this rank's tensors.

        The call sends nothing, and neither unshards nor reshards a parameter, so a forward or
        backward may be under way.
        """
        self.look()
        given = {
            "model": {**self._params, **dict(self._model.named_buffers(remove_duplicate=False))},
            "optimizer": sharded_optim_state_dict(self._model, self._optimizer),
            "others": {name: each.state_dict() for name, each in self._others.items()},
            "random": self._random(),
        }
        tensors: Tensors = []
        return _outlined(snapshot(given), tensors), tensors

    def _random(self) -> dict[str, torch.Tensor]:
        found = {"cpu": torch.get_rng_state()}
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            found["device"] = module.get_rng_state(self._device)
        return found

    def require_fits(self, structure: Any) -> None:
        """Check that ``structure`` has each buffer of this group; parameters were compared before.

        Raises:
            ReplicaGroupError: if a buffer is missing, or has another shape.
        """
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            slot = structure["model"].get(name)
            if slot is None or slot.shape != tuple(buffer.shape):
                there = "no such buffer" if slot is None else f"shape {slot.shape}"
                raise ReplicaGroupError(
                    f"buffer {name} has shape {tuple(buffer.shape)}, and in the state of the run "
                    f"{there}; build one model in all groups"
                )

    def wanted(self, structure: Any) -> list[Box]:
        """Return which part of each tensor of ``structure`` this rank needs, after ``look``."""
        found: dict[int, Box] = {}
        for section, name, slot in _slots(structure):
            param = self._params.get(name) if section in ("model", "optimizer") else None
            found[slot.index] = Box.whole(slot.shape)
            if isinstance(param, DTensor) and slot.is_cut and param.shape == slot.shape:
                found[slot.index] = box_here(spec_of(param))
        return [found[index] for index in range(len(found))]

    def dtypes(self, structure: Any) -> list[torch.dtype]:
        """Return the dtype of each tensor of ``structure``."""
        found = {slot.index: slot.dtype for _, _, slot in _slots(structure)}
        return [found[index] for index in range(len(found))]

    @torch.no_grad()
    def load(self, structure: Any, tensors: list[torch.Tensor]) -> None:
        """Put a received state in place; every rank of the group calls it.

        Args:
            structure: of the sender.
            tensors: the parts that ``wanted`` named.
        """
        self.look()

        def filled(section: str, name: str, slot: _Slot) -> torch.Tensor:
            param = self._params.get(name) if section in ("model", "optimizer") else None
            local = tensors[slot.index]
            if slot.is_cut and isinstance(param, DTensor) and param.shape == slot.shape:
                return as_cut(param, local.to(local_shard(param).device))
            return local

        state = _filled(structure, filled)
        self._model.load_state_dict(state["model"], strict=False)  # buffers may be unknown to it
        for name, buffer in self._model.named_buffers(remove_duplicate=False):
            buffer.copy_(state["model"][name])
        optimizer = flatten_sharded_optim_state_dict(
            state["optimizer"], self._model, self._optimizer
        )
        self._optimizer.load_state_dict(optimizer)
        for name, each in self._others.items():
            each.load_state_dict(state["others"][name])
        torch.set_rng_state(state["random"]["cpu"])
        if "device" in state["random"] and self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            module.set_rng_state(state["random"]["device"], self._device)


def _outlined(value: Any, tensors: Tensors) -> Any:
    """Return ``value`` with a slot in the place of each tensor, which is added to ``tensors``."""
    if isinstance(value, torch.Tensor):
        slot = _Slot(len(tensors), value)
        if isinstance(value, DTensor):
            tensors.append((local_shard(value), box_here(spec_of(value))))
        else:
            tensors.append((value, Box.whole(value.shape)))
        return slot
    if isinstance(value, dict):
        return {key: _outlined(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_outlined(item, tensors) for item in value])
    return value


def _slots(structure: Any) -> list[tuple[str, str, _Slot]]:
    found: list[tuple[str, str, _Slot]] = []

    def note(section: str, name: str, slot: _Slot) -> torch.Tensor:
        found.append((section, name, slot))
        return torch.empty(0)

    _filled(structure, note)
    return found


def _filled(structure: Any, fill: Any) -> Any:
    """Return ``structure`` with ``fill(section, name of the parameter, slot)`` for each slot."""

    def walk(value: Any, section: str, name: str) -> Any:
        if isinstance(value, _Slot):
            return fill(section, name, value)
        if isinstance(value, dict):
            return {key: walk(item, section, name) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)([walk(item, section, name) for item in value])
        return value

    result = dict(structure)
    result["model"] = {k: walk(v, "model", k) for k, v in structure["model"].items()}
    optimizer = dict(structure["optimizer"])
    optimizer["state"] = {k: walk(v, "optimizer", k) for k, v in optimizer["state"].items()}
    rest = {key: value for key, value in optimizer.items() if key != "state"}
    result["optimizer"] = {**walk(rest, "options", ""), "state": optimizer["state"]}
    result["others"] = walk(structure["others"], "others", "")
    result["random"] = walk(structure["random"], "random", "")
    return result
