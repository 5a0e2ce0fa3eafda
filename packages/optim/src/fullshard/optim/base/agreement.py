"""Agreement of ranks before a step sends anything: which parameters, with which rules.

Owns one comparison per mesh and step, of a digest that takes a few bytes. A rank that alone lacks a
gradient, or finds an error, so makes all raise: none is left waiting in an exchange for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh

from fullshard.optim.owners.ranks import group_of
from fullshard.sharding import RankMismatchError
from fullshard.sharding.spi import Comparison, device_of_mesh

__all__ = ["require_agreement"]

_WORDS = Comparison(
    what="the parameters of an optimizer",
    error="the optimizer cannot step, as some ranks found an error; ",
    mismatch="ranks disagree on what an optimizer is to step: ",
    advice="Give the optimizer the same parameters in the same order on every rank, with gradients "
    "of the same ones, and load its state on all ranks or on none",
)


def require_agreement(
    meshes: Iterable[DeviceMesh], lines: Mapping[DeviceMesh, Sequence[str]], error: str
) -> None:
    """Return if all ranks of each mesh are to step the same; they call it together.

    Args:
        meshes: the meshes over which parameters are sharded, in the same order on all their
            ranks.
        lines: what is to be equal, for each.
        error: what this rank found wrong by itself; empty if nothing.

    Raises:
        RankMismatchError: on every rank, if they disagree, or some of them found an error.
    """
    verdict = ""
    for mesh in meshes:
        process_group = group_of(mesh)
        if process_group is None:
            continue
        compared = [(line, line) for line in lines.get(mesh, ())]
        known = verdict or error  # a rank of two meshes passes the error to the second mesh
        found = _WORDS.verdict(compared, known, process_group, device_of_mesh(mesh))
        verdict = verdict or found
    if verdict:
        raise RankMismatchError(verdict)
