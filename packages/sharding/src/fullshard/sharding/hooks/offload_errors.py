"""Errors of offload policies that may fail on one rank, such as errors of a disk, on all ranks.

A rank with such an error goes on with wrong values, since other ranks wait for its collectives. At
the end of the backward, or of a forward without one, the ranks exchange errors, and all raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fullshard.sharding.base.comparison import Comparison
from fullshard.sharding.base.policies import declares
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.protocols import FallibleOffload
from fullshard.sharding.reduce.reduction import ReductionQueue

__all__ = ["error_of_this_rank", "may_fail", "raise_errors_of_ranks"]

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
    queue.store_early()
    mine = error = error_of_this_rank(groups)
    process_groups = {pg: each.device for each in groups for pg in each.mesh_info.process_groups}
    for process_group, device in process_groups.items():
        error = _WORDS.verdict([], error, process_group, device) or error
    if error:
        for group in groups:
            group.generation.advance()  # a group that stays unsharded has wrong values
        raise RuntimeError(error if error != mine else f"{_WORDS.error}{error}")
