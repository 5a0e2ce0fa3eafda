"""Memory that torch's gloo backend allocates inside a collective.

Seen in torch 2.13's ``ProcessGroupGloo.cpp``, and measured: a gather fills an extra buffer before
it is copied out; a reduce-scatter is an all-reduce of a copy; a reduction by gloo's ring
(``gloo/allreduce.cc``) has room for two segments of at most 1 MiB.
"""

from __future__ import annotations

from fullshard.preflight.races.collectives import Launched

__all__ = ["gloo_bytes"]

_SEGMENT = 2**20  # bytes


def gloo_bytes(launched: Launched) -> int:
    """Return the bytes that a collective allocates from its launch until it is waited for."""
    ranks = 1 if launched.group is None else launched.group.size()
    if ranks == 1:
        return 0
    read, written = (
        sum(each.numel() * each.itemsize for each in tensors)
        for tensors in (launched.read, launched.written)
    )
    if "gather" in launched.name:
        return written
    if "reduce_scatter" in launched.name:
        return read + _segments(read, ranks)
    return _segments(read, ranks) if "reduce" in launched.name else 0


def _segments(nbytes: int, ranks: int) -> int:
    """Two segments of a ring: each rank has as many, at least two."""
    count = max(-(-nbytes // _SEGMENT), 2 * ranks)
    return 2 * -(-nbytes // (-(-count // ranks) * ranks))
