"""Errors of offload policies that may fail on one rank, such as errors of a disk, on all ranks.

A rank with such an error continues with wrong values, since other ranks wait for its collectives.
At the end of the backward, or of a forward without one, or on entry to ``unsharded``, the ranks
exchange errors, and all raise. A gradient is lost if it could not be read to be added to or
clipped. Then all raise before the optimizer steps, and in each backward until it is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch

from fullshard.sharding import (
    ExtendedGroup,
    FSDPParam,
    FSDPParamGroup,
    Offload,
    RootExtension,
)
from fullshard.sharding.spi import Comparison, declares, gradients_of, local_shards

__all__ = ["FallibleOffload", "GradientOffload", "OffloadErrors", "raise_lost_gradients"]

_WORDS = Comparison(
    what="errors of offload", error="offload failed; ", mismatch="offload failed; ", advice=""
)


class FallibleOffload(Offload, Protocol):
    """An offload that declares ``may_fail``: a rank may have errors that the others do not have.

    After an error the policy returns wrong values, not an exception, for which other ranks would
    wait. Each rank is asked for its error at the end of a backward or of a forward without
    gradients, and when a root is found. The error is raised on all ranks.
    """

    def take_error(self) -> str:
        """Return the first error since the last call; empty if there was none."""


class GradientOffload(Offload, Protocol):
    """An offload that declares ``stores_gradients``: ``stage_out`` stores gradients, too.

    Clipping and steps call ``read_in`` for one gradient after another. A gradient that could not be
    read, or misses a part, is lost: while it is a parameter's gradient, all ranks raise
    ``error_of`` it at the end of each backward and in clipping. ``accumulate`` marks a sum as lost
    if one part cannot be read.
    """

    def read_in(self, gradient: torch.Tensor) -> bool:
        """Bring a gradient into memory before the host reads it; False if that is not possible."""

    def error_of(self, gradient: torch.Tensor) -> str:
        """Return why a gradient is lost; empty if it is not."""


class OffloadErrors(RootExtension):
    """Raises the errors of policies that may fail on all ranks."""

    def at_root(self, groups: Sequence[ExtendedGroup]) -> str:
        """Return the errors of this rank."""
        return _error_of_this_rank(_fallible(groups))

    def at_end(self, groups: Sequence[ExtendedGroup]) -> None:
        """Raise errors of reads and of lost gradients, once all gradients are stored."""
        if fallible := _fallible(groups):
            fallible[0].shared.queue.land()
            lost = _lost(param for group in fallible for param in group.params)
            mine = "; ".join(filter(None, (_error_of_this_rank(fallible), lost)))
            _raise_together(mine, fallible)

    def at_block(self, groups: Sequence[ExtendedGroup]) -> None:
        """Raise errors of reads."""
        if fallible := _fallible(groups):
            _raise_together(_error_of_this_rank(fallible), fallible)

    def at_commit(self, groups: Sequence[ExtendedGroup]) -> None:
        """Raise if a gradient was lost while it was added."""
        raise_lost_gradients(param for group in _fallible(groups) for param in group.params)


def raise_lost_gradients(params: Iterable[FSDPParam]) -> None:
    """Raise if a rank has lost a gradient of ``params``; all ranks call it together.

    Ranks exchange errors only if the policy of a parameter stores gradients.

    Raises:
        RuntimeError: on every rank, with the errors of all.
    """
    stored = [each for each in params if declares(each.offload, "stores_gradients")]
    error = _of_all_ranks(_lost(stored), stored)
    if error:
        raise RuntimeError(error)


def _fallible(groups: Sequence[ExtendedGroup]) -> list[FSDPParamGroup]:
    """Return the groups whose policy has errors to report."""
    own = cast(Sequence[FSDPParamGroup], groups)
    return [group for group in own if declares(group.policies.offload, "may_fail")]


def _error_of_this_rank(groups: Sequence[FSDPParamGroup]) -> str:
    """Return the errors of the policies of ``groups``, which may fail, and forget them."""
    policies = {id(each.policies.offload): each.policies.offload for each in groups}
    found = [cast(FallibleOffload, each).take_error() for each in policies.values()]
    return "; ".join(filter(None, found))


def _raise_together(mine: str, groups: Sequence[FSDPParamGroup]) -> None:
    """Raise the errors of all ranks, if there are any."""
    error = _of_all_ranks(mine, groups)
    if error:
        for group in groups:
            group.generation.advance()  # a group that stays unsharded has wrong values
        raise RuntimeError(error)


def _lost(params: Iterable[FSDPParam]) -> str:
    """Return the error of the first gradient that is lost; empty if none is."""
    stored = [each for each in params if declares(each.offload, "stores_gradients")]
    gradients = local_shards(gradients_of([each.sharded for each in stored]))
    for param, gradient in zip(stored, gradients, strict=True):
        if gradient is not None:
            error = cast(GradientOffload, param.offload).error_of(gradient)
            if error:
                return f"{param.name}: {error}"
    return ""


def _of_all_ranks(mine: str, placed: Iterable[FSDPParamGroup | FSDPParam]) -> str:
    """Return the errors of all ranks, for a message; empty if there are none."""
    error = mine
    meshes = {id(each.mesh_info): each for each in placed}.values()
    process_groups = {pg: each.device for each in meshes for pg in each.mesh_info.process_groups}
    for process_group, device in process_groups.items():
        error = _WORDS.verdict([], error, process_group, device) or error
    return f"{_WORDS.error}{error}" if error and error == mine else error
