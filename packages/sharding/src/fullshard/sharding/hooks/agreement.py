"""What all ranks must agree on, checked before the first collective of a root.

Owns one exchange of a digest per process group. Where digests differ, the ranks exchange what they
are made of, and every rank raises the same error, so that none is left waiting for another. Numbers
in names are compared as ``Numbering`` counts them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from fullshard.comm import EventKind, check_collective
from fullshard.sharding.base.numbering import Numbering
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.module_state import ModuleState

__all__ = ["RankMismatchError", "check_agreement", "digests_differ"]

_Line = tuple[str, str]  # what is compared; what is said
_ERROR = "fully_shard cannot start, as some ranks found an error; "
_MISMATCH = "ranks disagree on what fully_shard is to communicate: "


class RankMismatchError(RuntimeError):
    """Ranks disagree on what is sharded, or how; raised on every rank of the mesh."""


def check_agreement(states: Sequence[ModuleState], root: ModuleState, error: str) -> None:
    """Returns if all ranks that share a process group see the same parameters in the same order.

    Args:
        states: the sharded modules under one root, in order.
        root: the root.
        error: what this rank found wrong by itself; empty if nothing.

    Raises:
        RankMismatchError: on every rank, naming the first parameter that differs and what each rank
            has, or repeating the error that some ranks found.
        ValueError: if every rank found the same ``error``.
    """
    verdict = ""
    known = _ranks_of(root)
    compared = Numbering(_names_of(states)).of
    differing = set()
    for exchange in _exchanges(states):
        if exchange.process_group in differing:
            continue  # its ranks know, and may not agree on whether there is more to exchange
        if verdict and exchange.optional and exchange.ranks <= known:
            continue  # all of its ranks know already, and one of them may lack this process group
        found = verdict or error
        lines: list[_Line] = [(f"error: {found}",) * 2] if found else []
        for state in exchange.members:
            both = [
                _signature(state, exchange.process_group, is_root=state is root, say=say)
                for say in (compared, str)
            ]
            lines += zip(*both, strict=True)
        # Nobody raises before the last exchange: ranks of other groups would wait for it.
        difference = _compare(lines, exchange.process_group, root.device)
        if difference:
            differing.add(exchange.process_group)
            verdict = difference
    if verdict:
        raise RankMismatchError(verdict)
    if error:
        raise ValueError(error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Exchange:
    """What one process group agrees on.

    Attributes:
        process_group: the ranks that compare.
        members: the modules that communicate over it; none if only errors are to be known.
        optional: whether it is only some parameters', not that of a module.
    """

    process_group: dist.ProcessGroup
    members: list[ModuleState]
    optional: bool

    @property
    def ranks(self) -> frozenset[int]:
        """Its ranks, by their global number."""
        return frozenset(dist.get_process_group_ranks(self.process_group))


def _ranks_of(state: ModuleState) -> frozenset[int]:
    return frozenset(state.mesh_info.mesh.mesh.flatten().tolist())


def _exchanges(states: Sequence[ModuleState]) -> list[_Exchange]:
    """Returns an exchange per process group: those that shard, then replicas, then the optional.

    The first two by the meshes of the modules, not of the groups: a rank may have no parameter in
    any. What all of them say of other meshes is how many ranks those have, so that a process group
    that a rank lacks is found there. And what is found on a part of their ranks, in an optional
    exchange, they tell each other at the end.
    """
    first: dict[dist.ProcessGroup, list[ModuleState]] = {}
    others: dict[dist.ProcessGroup, list[ModuleState]] = {}
    for state in states:
        first.setdefault(state.mesh_info.process_groups[0], []).append(state)
    for state in states:
        for process_group in state.mesh_info.process_groups[1:]:
            first.setdefault(process_group, []).append(state)
    for state in states:
        for process_group in dict.fromkeys(
            each for group in state.own_groups for each in group.mesh_info.process_groups
        ):
            if process_group not in first:
                others.setdefault(process_group, []).append(state)
            elif state not in first[process_group]:
                first[process_group].append(state)
    again = [
        _Exchange(process_group=process_group, members=[], optional=False)
        for process_group, members in first.items()
        if any(_has_other_meshes(state) for state in members)
    ]
    return [
        _Exchange(process_group=process_group, members=members, optional=found is others)
        for found in (first, others)
        for process_group, members in found.items()
    ] + again


def _has_other_meshes(state: ModuleState) -> bool:
    own = state.mesh_info.process_groups
    return any(group.mesh_info.process_groups != own for group in state.own_groups)


def _names_of(states: Sequence[ModuleState]) -> list[str]:
    """Returns the full names of all modules and parameters that are sharded."""
    params = [param for state in states for group in state.own_groups for param in group.params]
    modules = [name for state in states for name in state.name.split(", ")]
    return [*modules, *(param.name for param in params)]


def _signature(
    state: ModuleState,
    process_group: dist.ProcessGroup,
    *,
    is_root: bool,
    say: Callable[[str], str],
) -> list[str]:
    """Returns what must be equal on all ranks, a line each, parameters before their totals.

    Of parameters on other meshes only how many ranks those have: ranks of one may hold experts that
    ranks of another do not know. ``say`` gives names their form.
    """
    name = say(state.label)
    lines = [f"module {name!r}"]
    count = 0
    for group in state.own_groups:
        if process_group not in group.mesh_info.process_groups:
            lines.append(_size_of(group, say))
            continue
        count += len(group.params)
        for param in group.params:
            lines.append(
                f"{say(param.name)}: shape {tuple(param.shape)} sharded on dim {param.dim}, placed "
                f"as {param.spec.placements}, stored in {param.sharded.dtype}, gathered in "
                f"{param.gather_spec.dtype}, reduced in {param.reduce_dtype}, "
                f"requires_grad={param.requires_grad}"
            )
        lines.append(_size_of(group, say))
        lines.append(
            f"parameter group {say(group.name)!r} with gathers that share launches up to "
            f"{group.gather_cap_mb:g} MiB, reductions up to {group.gradients.bucket_cap_mb:g} MiB, "
            f"sums only: {group.gradients.force_sum}"
        )
    lines.append(f"the end of module {name!r} with {count} parameters of its own")
    lines.append(
        f"module {name!r} resharded after forward: {state.reshard.after_forward(is_root)}, after "
        f"backward: {state.reshard.after_backward(is_root)}, over a post-forward mesh of: "
        f"{[group.gathering.post_forward_size for group in state.own_groups]}, prefetched by "
        f"{_describe(state.prefetch)}"
    )
    return lines


def _size_of(group: FSDPParamGroup, say: Callable[[str], str]) -> str:
    shards = group.mesh_info.shard_world_size
    replicas = group.mesh_info.data_parallel_size // shards
    return (
        f"parameter group {say(group.name)!r} sharded over {shards} ranks with {replicas} replicas"
    )


def _describe(policy: object) -> str:
    """Returns a policy's settings if they are data, else its class: an address is no setting."""
    return repr(policy) if dataclasses.is_dataclass(policy) else type(policy).__qualname__


def digests_differ(
    lines: Iterable[str], process_group: dist.ProcessGroup, device: torch.device, what: str
) -> bool:
    """Tells all ranks alike whether ``lines`` differ between them; a digest of them travels.

    Args:
        lines: what must be equal on all ranks.
        process_group: the ranks that compare.
        device: on which the digest travels.
        what: what the collective is for, where debug mode names it.
    """
    world_size = dist.get_world_size(process_group)
    if world_size == 1:
        return False
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor([int.from_bytes(digest[:8], signed=True)], dtype=torch.int64, device=device)
    # filled with our own, so that a process group that moves nothing finds agreement
    digests = [mine.clone() for _ in range(world_size)]
    check_collective(EventKind.ALL_GATHER, what, process_group, nbytes=mine.nbytes)
    dist.all_gather(digests, mine, group=process_group)
    return not bool((torch.cat(digests) == mine).all())


def _compare(lines: list[_Line], process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns what the ranks disagree on, or nothing."""
    compared = [each for each, _ in lines]
    if not digests_differ(compared, process_group, device, "the agreement of the root"):
        return ""
    everyone: list[list[_Line]] = [[] for _ in range(dist.get_world_size(process_group))]
    dist.all_gather_object(everyone, lines, group=process_group)
    return _explain(dict(zip(dist.get_process_group_ranks(process_group), everyone, strict=True)))


def _explain(everyone: dict[int, list[_Line]]) -> str:
    """Returns the first difference; ``everyone``: what each rank, by its global number, said."""
    errors = {
        rank: lines[0][1].removeprefix("error: ")
        for rank, lines in everyone.items()
        if lines and lines[0][1].startswith("error: ")
    }
    for text in errors.values():
        if text.startswith((_ERROR, _MISMATCH)):
            return text  # from an earlier exchange
    if errors:
        return _ERROR + "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())
    length = max(len(lines) for lines in everyone.values())
    for index in range(length):
        column = {
            rank: lines[index] if index < len(lines) else ("nothing more",) * 2
            for rank, lines in everyone.items()
        }
        if len({compared for compared, _ in column.values()}) > 1:
            said = "; ".join(f"rank {rank} has {line}" for rank, (_, line) in column.items())
            return (
                f"{_MISMATCH}{said}. Build the same model, with the same fully_shard calls in the "
                "same order, on every rank"
            )
    raise AssertionError("digests differ, so some line does")
