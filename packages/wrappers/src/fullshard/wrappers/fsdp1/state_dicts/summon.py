"""Full parameters for a block of code, as FSDP1 gives them: in full precision, with gradients.

Owns the choice of how such a block is opened, and the full gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.checkpoint.spi import whole
from fullshard.sharding import FSDPParam, FSDPParamGroup
from fullshard.sharding.spi import Mode, group_of, on_any_rank, opened, owner_of, registry_of

__all__ = ["Summons", "summoned"]


@dataclass(frozen=True, kw_only=True)
class Summons:
    """The arguments of a block.

    Attributes:
        recurse: also for the instances below.
        writeback: write what was changed into the shards at the end.
        rank0_only: only the first rank gets full parameters.
        offload_to_cpu: return copies on the CPU.
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
        """Check the flags.

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
    """Give ``module`` full parameters inside a ``with`` block, and shards again after it.

    Where forward uses another dtype than is stored, they are copies in the stored one: changes
    lose no precision, and no forward may run.
    """
    shown = _sharded_under(module, summons.recurse)
    mode = Mode(
        writeback=summons.writeback,
        rank0_only=summons.rank0_only,
        copied=summons.offload_to_cpu or not summons.exact,
        on_cpu=summons.offload_to_cpu,
    )
    with opened(module, mode, recurse=summons.recurse):
        if not summons.with_grads:
            yield
            return
        gradients = _show_gradients(shown)
        try:
            yield
        finally:
            for each in gradients:
                each.take_back()
    if summons.writeback:
        for each in gradients:
            each.store()


@dataclass(frozen=True)
class _Place:
    """Where a parameter is held."""

    module: nn.Module
    name: str

    def full(self, sharded: torch.Tensor) -> torch.Tensor | None:
        """Return the full parameter in the place of ``sharded``; None if this rank has none."""
        held = registry_of(self.module).get(self.name)
        return None if held is sharded else held


@dataclass(frozen=True)
class _Sharded:
    """A sharded parameter and its group."""

    param: FSDPParam
    group: FSDPParamGroup


def _sharded_under(module: nn.Module, recurse: bool) -> dict[_Place, _Sharded]:
    """Return who shards the parameters, unsharded now or not, and where each is first held."""
    found: dict[FSDPParam, tuple[_Place, _Sharded]] = {}
    for each in module.modules() if recurse else [module]:
        for name, param in each.named_parameters(recurse=False):
            owner, group = owner_of(param), group_of(param)
            if owner is not None and group is not None:
                sharded = _Sharded(owner, group)
                found.setdefault(owner, (_Place(each, name), sharded))
    return dict(found.values())


_showing: weakref.WeakSet[FSDPParam] = weakref.WeakSet()


def _show_gradients(shown: dict[_Place, _Sharded]) -> list[_Gradient]:
    """Give each full parameter its full gradient, one after the other; every rank takes part.

    But for those to which an outer block gave it.
    """
    found = {place: owner for place, owner in shown.items() if owner.param not in _showing}
    groups = dict.fromkeys(owner.group for owner in found.values())
    unreduced = {each: on_any_rank(each.gradients.has_unreduced, [each]) for each in groups}
    return [
        _Gradient(place, owner, unreduced=unreduced[owner.group]) for place, owner in found.items()
    ]


class _Gradient:
    """The full gradient of a parameter, for a block.

    [Note: unreduced gradients] What backwards under ``no_sync`` left is the rank's own. The
    gradient is shown as the sum with earlier reductions. Where any rank has some, all of the
    gradient is written back as the rank's own, and the next reduction, a mean, gives what each rank
    wrote its share.
    """

    def __init__(self, place: _Place, owner: _Sharded, *, unreduced: bool) -> None:
        """Show it; every rank takes part."""
        self._param = param = owner.param
        self._gradients = owner.group.gradients
        self._held = place.full(param.sharded)
        self._unreduced = unreduced
        self._own = self._gradients.take_of(param)
        self._written: torch.Tensor | None = None
        _showing.add(param)
        full: torch.Tensor | None = None
        if param.sharded.grad is not None:
            assert isinstance(param.sharded.grad, DTensor), "it is sharded as its parameter is"
            full = whole(param.sharded.grad)
        if self._own is not None:
            own = param.sharding.to_use(self._own)
            full = own.clone() if full is None else full + own
        if self._held is not None and full is not None:
            self._held.grad = full.to(self._held.device, self._held.dtype)

    def take_back(self) -> None:
        """Take the gradient from the full parameter; all is as it was before the block."""
        _showing.discard(self._param)
        if self._held is not None:
            self._written, self._held.grad = self._held.grad, None
        self._gradients.set_grad(self._param, self._own)

    @torch.no_grad()
    def store(self) -> None:
        """Write what was taken back into the gradient; sends nothing."""
        sharded, full = self._param.sharded, self._written
        if full is None or self._unreduced:
            own = None
            if full is not None:
                own = self._param.sharding.to_reduce(full.detach(), full.dtype)
            self._gradients.set_grad(self._param, own)
            sharded.grad = None
            return
        assert isinstance(sharded, DTensor), "fully_shard makes DTensors"
        mesh = sharded.device_mesh
        cut = distribute_tensor(
            full.detach().to(mesh.device_type), mesh, sharded.placements, src_data_rank=None
        ).to(sharded.device)
        if sharded.grad is None:
            sharded.grad = cut.to(sharded.dtype)
        else:
            sharded.grad.copy_(cut)
