"""Full parameters for a block of code, as FSDP1 gives them: in full precision, with gradients.

Owns the choice of how ``fullshard.sharding.unsharded`` is opened, and the full gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.sharding import unsharded
from fullshard.wrappers.state_dict_parts import whole

__all__ = ["Summons", "summoned"]


@dataclass(frozen=True, kw_only=True)
class Summons:
    """The arguments of a block.

    Attributes:
        recurse: also for the instances below.
        writeback: write what was changed into the shards at the end.
        rank0_only: only the first rank gets full parameters.
        offload_to_cpu: hand out copies on the CPU.
        with_grads: full gradients as well.
        exact: what forward uses is what is stored: no dtype is cast to another.
    """

    recurse: bool
    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool
    exact: bool

    def __post_init__(self) -> None:
        """Checks the flags.

        Raises:
            TypeError: if one is not a bool.
            ValueError: if gradients of one rank are to be written back.
        """
        for name, value in vars(self).items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}; pass True or False")
        if self.with_grads and self.rank0_only and self.writeback:
            raise ValueError(
                "with_grads, rank0_only and writeback cannot go together: gradients are written "
                "back by every rank from its own; pass writeback=False, or rank0_only=False"
            )


@contextmanager
def summoned(module: nn.Module, summons: Summons) -> Iterator[None]:
    """Gives ``module`` full parameters inside a ``with`` block, and shards again after it.

    Where forward uses another dtype than is stored, they are copies in the stored one: changes
    lose no precision, and no forward may run.
    """
    copied = summons.offload_to_cpu or not summons.exact
    shown = _sharded_under(module, summons.recurse)
    with unsharded(
        module,
        writeback=summons.writeback,
        rank0_only=summons.rank0_only,
        offload_to_cpu=copied,
        recurse=summons.recurse,
    ):
        if copied and not summons.offload_to_cpu:
            _bring_back(shown)
        if not summons.with_grads:
            yield
            return
        taken: list[tuple[DTensor, torch.Tensor | None]] = []
        _show_gradients(shown)
        try:
            yield
        finally:
            taken = _take_gradients(shown)
    if summons.writeback:
        for param, gradient in taken:
            _store_gradient(param, gradient)


@dataclass(frozen=True)
class _Place:
    """Where a parameter is held."""

    module: nn.Module
    name: str

    def full(self, sharded: torch.Tensor) -> torch.Tensor | None:
        """Returns the full parameter in the place of ``sharded``; None if this rank has none."""
        held = self.module._parameters.get(self.name)
        return None if held is sharded else held


def _sharded_under(module: nn.Module, recurse: bool) -> dict[_Place, DTensor]:
    """Returns the sharded parameters and where each is first held."""
    found: dict[int, tuple[_Place, DTensor]] = {}
    for each in module.modules() if recurse else [module]:
        for name, param in each.named_parameters(recurse=False):
            if isinstance(param, DTensor):
                found.setdefault(id(param), (_Place(each, name), param))
    return dict(found.values())


def _bring_back(shown: dict[_Place, DTensor]) -> None:
    """Moves the copies to where the model computes; they stay the same parameters."""
    for place, sharded in shown.items():
        held, kind = place.full(sharded), sharded.device_mesh.device_type
        if held is not None and held.device.type != kind:
            held.data = held.data.to(kind)


def _show_gradients(shown: dict[_Place, DTensor]) -> None:
    """Gives each full parameter its full gradient, one after the other; every rank takes part."""
    for place, sharded in shown.items():
        if sharded.grad is None:
            continue
        assert isinstance(sharded.grad, DTensor), "a gradient is sharded as its parameter is"
        full, local = whole(sharded.grad), sharded.grad.to_local()
        if full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
            full = full.clone()  # it is replicated
        held = place.full(sharded)
        if held is not None:
            held.grad = full.to(held.device, held.dtype)


def _take_gradients(shown: dict[_Place, DTensor]) -> list[tuple[DTensor, torch.Tensor | None]]:
    """Returns the gradients of the full parameters, which then have none."""
    taken = []
    for place, sharded in shown.items():
        held = place.full(sharded)
        if held is not None:
            taken.append((sharded, held.grad))
            held.grad = None
    return taken


@torch.no_grad()
def _store_gradient(sharded: DTensor, full: torch.Tensor | None) -> None:
    """Cuts this rank's part of ``full`` into the sharded gradient; sends nothing."""
    if full is None:
        sharded.grad = None
        return
    mesh = sharded.device_mesh
    cut = distribute_tensor(
        full.detach().to(mesh.device_type), mesh, sharded.placements, src_data_rank=None
    ).to(sharded.device)
    if sharded.grad is None:
        sharded.grad = cut.to(sharded.dtype)
    else:
        sharded.grad.copy_(cut)
