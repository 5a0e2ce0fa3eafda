"""Errors of offload policies that may fail on one rank, such as errors of a disk, on all ranks.

A rank with such an error continues with wrong values, since other ranks wait for its collectives.
At the end of the backward, or of a forward without one, or on entry to ``unsharded``, the ranks
exchange errors, and all raise. A gradient is lost if it could not be read to be added to or
clipped. Then all raise before the optimizer steps, and in each backward until it is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from fullshard.sharding.base.comparison import Comparison
from fullshard.sharding.base.compat import gradients_of, local_shards
from fullshard.sharding.base.policies import declares
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.protocols import FallibleOffload, GradientOffload
from fullshard.sharding.reduce.reduction import ReductionQueue

__all__ = [
    "error_of_this_rank",
    "may_fail",
    "raise_errors_of_gathers",
    "raise_errors_of_ranks",
    "raise_lost_gradients",
]

_WORDS = Comparison(
    what="errors of offload", error="offload failed; ", mismatch="offload failed; ", advice=""
)


def may_fail(group: FSDPParamGroup) -> bool:
    """Return whether the offload policy of ``group`` has errors to report."""
    return declares(group.policies.offload, "may_fail")


def error_of_this_rank(groups: Sequence[FSDPParamGroup]) -> str:
    """Return the errors of the policies of ``groups``, which may fail, and forget them."""
    policies = {id(each.policies.offload): each.policies.offload for each in groups}
    found = [cast(FallibleOffload, each).take_error() for each in policies.values()]
    return "; ".join(filter(None, found))


def raise_errors_of_ranks(groups: Sequence[FSDPParamGroup], queue: ReductionQueue) -> None:
    """Raise if an offload policy of ``groups`` failed on a rank; all ranks call it together.

    Args:
        groups: the groups with policies that may fail.
        queue: the reductions of the root, whose gradients are stored first.

    Raises:
        RuntimeError: on every rank, with the errors of all.
    """
    queue.land()
    lost = _lost(param for group in groups for param in group.params)
    _raise_together("; ".join(filter(None, (error_of_this_rank(groups), lost))), groups)


def raise_errors_of_gathers(groups: Iterable[FSDPParamGroup]) -> None:
    """Raise if a policy of ``groups`` failed on a rank, between steps; all ranks call it together.

    Raises:
        RuntimeError: on every rank, with the errors of all.
    """
    fallible = list(filter(may_fail, groups))
    if fallible:
        _raise_together(error_of_this_rank(fallible), fallible)


def _raise_together(mine: str, groups: Sequence[FSDPParamGroup]) -> None:
    """Raise the errors of all ranks, if there are any."""
    error = _of_all_ranks(mine, groups)
    if error:
        for group in groups:
            group.generation.advance()  # a group that stays unsharded has wrong values
        raise RuntimeError(error)


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
