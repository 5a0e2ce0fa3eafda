"""What all ranks must agree on, checked before the first collective of a root.

Owns one exchange of a digest per process group. Where digests differ, the ranks exchange what they
are made of, and every rank raises the same error, so that none is left waiting for another.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.sharding.module_state import ModuleState

__all__ = ["RankMismatchError", "check_agreement"]

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
    for process_group, members in _exchanges(states):
        found = verdict or error
        lines = [f"error: {found}"] if found else []
        lines += [line for state in members for line in _signature(state, state is root)]
        # Nobody raises before the last exchange: ranks of other groups would wait for it.
        verdict = _compare(lines, process_group, members[0].device) or verdict
    if verdict:
        raise RankMismatchError(verdict)
    if error:
        raise ValueError(error)


def _exchanges(
    states: Sequence[ModuleState],
) -> list[tuple[dist.ProcessGroup, list[ModuleState]]]:
    """Returns each process group with its modules: those that shard first, then replicas.

    By the meshes of the modules, not of the groups: a rank may have no parameter in any.
    """
    found: dict[dist.ProcessGroup, list[ModuleState]] = {}
    for state in states:
        found.setdefault(state.mesh_info.shard_process_group, []).append(state)
    for state in states:
        for process_group in state.mesh_info.process_groups[1:]:
            found.setdefault(process_group, []).append(state)
    return list(found.items())


def _signature(state: ModuleState, is_root: bool) -> list[str]:
    """Returns what must be equal on all ranks, a line each, parameters before their totals."""
    name = state.label
    lines = [f"module {name!r}"]
    for group in state.own_groups:
        for param in group.params:
            lines.append(
                f"{param.name}: shape {tuple(param.shape)} sharded on dim {param.dim}, stored in "
                f"{param.sharded.dtype}, gathered in {param.gather_spec.dtype}, reduced in "
                f"{param.reduce_dtype}, requires_grad={param.requires_grad}"
            )
    count = sum(len(group.params) for group in state.own_groups)
    lines.append(f"the end of module {name!r} with {count} parameters of its own")
    lines.append(
        f"module {name!r} resharded after forward: {state.reshard.after_forward(is_root)}, after "
        f"backward: {state.reshard.after_backward(is_root)}, over a smaller world: "
        f"{[group.gathering.smaller_size for group in state.own_groups]}, prefetched by "
        f"{_describe(state.prefetch)}"
    )
    return lines


def _describe(policy: object) -> str:
    """Returns a policy's settings if they are data, else its class: an address is no setting."""
    return repr(policy) if dataclasses.is_dataclass(policy) else type(policy).__qualname__


def _compare(lines: list[str], process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns what the ranks disagree on, or nothing."""
    world_size = dist.get_world_size(process_group)
    if world_size == 1:
        return ""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.tensor([int.from_bytes(digest[:8], signed=True)], dtype=torch.int64, device=device)
    # filled with our own, so that a process group that moves nothing finds agreement
    digests = [mine.clone() for _ in range(world_size)]
    dist.all_gather(digests, mine, group=process_group)
    if bool((torch.cat(digests) == mine).all()):
        return ""
    everyone: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(everyone, lines, group=process_group)
    return _explain(dict(zip(dist.get_process_group_ranks(process_group), everyone, strict=True)))


def _explain(everyone: dict[int, list[str]]) -> str:
    """Returns the first difference; ``everyone``: what each rank, by its global number, said."""
    errors = {
        rank: lines[0].removeprefix("error: ")
        for rank, lines in everyone.items()
        if lines and lines[0].startswith("error: ")
    }
    for text in errors.values():
        if text.startswith((_ERROR, _MISMATCH)):
            return text  # from an earlier exchange
    if errors:
        return _ERROR + "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())
    length = max(len(lines) for lines in everyone.values())
    for index in range(length):
        column = {
            rank: lines[index] if index < len(lines) else "nothing more"
            for rank, lines in everyone.items()
        }
        if len(set(column.values())) > 1:
            said = "; ".join(f"rank {rank} has {line}" for rank, line in column.items())
            return (
                f"{_MISMATCH}{said}. Build the same model, with the same fully_shard calls in the "
                "same order, on every rank"
            )
    raise AssertionError("digests differ, so some line does")
