"""The parameters whose gradients make a norm: which they are, and how each counts.

Owns the walk from what a user gives to the parameters that the optimizer sees, and keeps what it
found for the next norm of the same: the first parameter that ``fully_shard`` replaced keeps it, so
it goes when the model goes. It reads no gradient. What a gradient counts for is ``norm_group``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.sharding.base.compat import ShardingSpec, local_shards, specs_of
from fullshard.sharding.optim.norm_group import NormGroup, norm_group_of
from fullshard.sharding.params.owner import owner_of
from fullshard.sharding.params.param import FSDPParam

__all__ = ["NormTerms", "Parameters", "terms_of"]

Parameters = nn.Module | torch.Tensor | Iterable[torch.Tensor]

_DOUBLE = frozenset({torch.float64, torch.complex128})


@dataclass(frozen=True)
class NormTerms:
    """The parameters of a norm.

    Attributes:
        params: those that the optimizer sees, each once; none make a norm of 0.
        group: where the norm is summed.
        specs: the spec of each; none if one is no ``DTensor``.
    """

    params: tuple[torch.Tensor, ...]
    group: NormGroup
    specs: tuple[ShardingSpec | None, ...]

    def are_cut_alike(self, gradients: Sequence[object]) -> bool:
        """Tells whether there is a gradient of each parameter, with the parameter's own spec."""
        return bool(self.specs) and all(map(is_, specs_of(gradients), self.specs))

    @property
    def double(self) -> bool:
        """Whether any is of 64 bits per number."""
        params: Sequence[Any] = self.params
        if self.specs:
            params = local_shards(params)  # torch is slow to tell a DTensor's dtype
        return not _DOUBLE.isdisjoint([each.dtype for each in params])


@dataclass(frozen=True)
class _Found:
    """What was found last, and for whom.

    Attributes:
        given: what was found registered, or given.
        process_group: what the user gave.
        changes: how often parameters had been replaced by then.
        terms: what came of it.
    """

    given: list[Any]
    process_group: dist.ProcessGroup | None
    changes: int
    terms: NormTerms

    def is_of(self, given: list[Any], process_group: dist.ProcessGroup | None) -> bool:
        """Tells whether it serves for these."""
        return (
            self.changes == FSDPParam.changes
            and self.process_group is process_group
            and len(self.given) == len(given)
            and all(map(is_, self.given, given))
        )


def terms_of(parameters: Parameters, process_group: dist.ProcessGroup | None) -> NormTerms:
    """Returns the terms of the norm of the gradients of ``parameters``.

    Parameters that ``fully_shard`` replaced, or that are unsharded now, stand for their sharded
    ones. A collective call if it makes a process group: the first time.

    Args:
        parameters: a module, a parameter or several; each counts once.
        process_group: ranks beyond the parameters' own meshes; None: those meshes.

    Raises:
        TypeError: if ``parameters`` is or holds something that is no tensor.
        ValueError: if ``process_group`` lacks ranks of the parameters' meshes.
    """
    given = _listed(parameters)
    keeper = next((owner.param for each in given if (owner := _owner_of(each)) is not None), None)
    found = None if keeper is None else keeper.norm_terms
    if isinstance(found, _Found) and found.is_of(given, process_group):
        return found.terms
    terms = _terms(given, process_group)
    if keeper is not None:
        keeper.norm_terms = _Found(given, process_group, FSDPParam.changes, terms)
    return terms


def _listed(parameters: Parameters) -> list[Any]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)


def _owner_of(given: object) -> Any:
    return owner_of(given) if isinstance(given, torch.Tensor) else None


def _terms(given: list[Any], process_group: dist.ProcessGroup | None) -> NormTerms:
    standing: dict[int, torch.Tensor] = {}
    for param in given:
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"parameters is or holds a {type(param).__name__}; pass a module, or its "
                "parameters()"
            )
        owner = owner_of(param)
        stands_for = param if owner is None else owner.param.sharded
        standing[id(stands_for)] = stands_for
    params = tuple(standing.values())
    if not params:
        return NormTerms((), NormGroup(None, torch.device("cpu"), ()), ())
    cut = all(isinstance(param, DTensor) for param in params)
    specs = tuple(specs_of(params)) if cut else ()
    return NormTerms(params, norm_group_of(params, process_group), specs)
