"""Checks that all ranks agree, before the first collective of a root.

Owns one exchange of a digest per process group. If digests differ, the ranks exchange their
contents, and every rank raises the same error, so that no rank waits for another. Numbers in names
are renumbered: a list may have different ignored modules on each rank, so its sharded modules may
have different numbers.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from fullshard.comm.spi import default_transport
from fullshard.sharding.base.comparison import Comparison, Line, RankMismatchError
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.module_state import ModuleState

__all__ = ["check_agreement"]

_NAME = re.compile(r"[^\s,]+")
_WORDS = Comparison(
    what="the agreement of the root",
    error="fully_shard cannot start, as some ranks found an error; ",
    mismatch="ranks disagree on what fully_shard is to communicate: ",
    advice="Build the same model, with the same fully_shard calls in the same order, on every rank",
)


def check_agreement(states: Sequence[ModuleState], root: ModuleState, error: str) -> None:
    """Check that all ranks that share a process group see equal parameters in equal order.

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
    compared = _counted_anew(_names_of(states))
    differing = set()
    groups = (group for state in states for group in state.groups)
    plug_in = next((group.gathering.config.comm for group in groups), None)
    for exchange in _exchanges(states):
        if exchange.process_group in differing:
            continue  # its ranks know, and may not agree on whether there is more to exchange
        if verdict and exchange.optional and exchange.ranks <= known:
            continue  # its ranks know already, and a rank may lack this process group
        lines: list[Line] = []
        for state in exchange.members:
            both = [
                _signature(state, exchange.process_group, is_root=state is root, say=say)
                for say in (compared, str)
            ]
            lines += zip(*both, strict=True)
        # Errors are raised only after the last exchange: ranks of other groups would wait for it.
        found = verdict or error
        difference = _WORDS.verdict(lines, found, exchange.process_group, root.device, plug_in)
        if difference:
            differing.add(exchange.process_group)
            verdict = difference
    if verdict:
        raise RankMismatchError(verdict)
    if error:
        raise ValueError(error)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GroupExchange:
    """The exchange of one process group.

    Attributes:
        process_group: the ranks that compare.
        members: the modules that communicate over it; none if only errors are to be known.
        optional: whether the exchange belongs to some parameters only, and not to a module.
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


def _exchanges(states: Sequence[ModuleState]) -> list[_GroupExchange]:
    """Return an exchange per process group: those that shard, then replicas, then the optional.

    The first two by the meshes of the modules, not of the groups: a rank may have no parameter in
    any. For other meshes, all modules report the number of ranks, so that a missing process group
    on a rank is found. And what is found on a part of their ranks, in an optional exchange, they
    tell each other at the end.
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
        _GroupExchange(process_group=process_group, members=[], optional=False)
        for process_group, members in first.items()
        if any(_has_other_meshes(state) for state in members)
    ]
    return [
        _GroupExchange(process_group=process_group, members=members, optional=found is others)
        for found in (first, others)
        for process_group, members in found.items()
    ] + again


def _has_other_meshes(state: ModuleState) -> bool:
    own = state.mesh_info.process_groups
    return any(group.mesh_info.process_groups != own for group in state.own_groups)


def _names_of(states: Sequence[ModuleState]) -> list[str]:
    """Return the full names of all modules and parameters that are sharded."""
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
    """Return a line for each fact that must be equal on all ranks, parameters before totals.

    For parameters on other meshes, only the number of ranks is reported: some ranks may hold
    experts that other ranks do not know. ``say`` gives names their form.
    """
    name, settings = say(state.label), state.settings
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
                f"sent as {param.sent.form} and {param.grad_sent.form}, "
                f"requires_grad={param.sharded.requires_grad}"
            )
        lines.append(_size_of(group, say))
        force_sum = group.gradients.setups.settings.force_sum
        lines.append(
            f"parameter group {say(group.name)!r} with "
            f"sums only: {force_sum}, hosts: {getattr(group.policies.wire, 'hosts', None)}"
            f", moved by default by: {type(default_transport(process_group)).__name__}"
            f", storage kept: {group.gathering.setup.keeps_storage}, full parameters kept: "
            f"{group.gathering.keeps_full}, gradients that wait reduced over: "
            f"{group.gradients.early_reduction.value}"
        )
    lines.append(f"the end of module {name!r} with {count} parameters of its own")
    lines.append(
        f"module {name!r} resharded after forward: {settings.after_forward(is_root)}, after "
        f"backward: {settings.after_backward(is_root)}, over a post-forward mesh of: "
        f"{[group.gathering.setup.post_forward_size for group in state.own_groups]}, prefetched by "
        f"{_describe(settings.prefetch)}"
        + (f", scheduled by {state.context.schedule!r}" if is_root else "")
    )
    return lines


def _size_of(group: FSDPParamGroup, say: Callable[[str], str]) -> str:
    shards = group.mesh_info.shard_world_size
    replicas = group.mesh_info.data_parallel_size // shards
    return (
        f"parameter group {say(group.name)!r} sharded over {shards} ranks with {replicas} replicas"
    )


def _describe(policy: object) -> str:
    """Return a policy's settings if it is a dataclass, and its class name otherwise."""
    return repr(policy) if dataclasses.is_dataclass(policy) else type(policy).__qualname__


def _counted_anew(names: Iterable[str]) -> Callable[[str], str]:
    """Return a function that renumbers names by the places among sharded numbered children.

    Args:
        names: full names of what is sharded.
    """
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name in names:
        parts = tuple(name.split("."))
        for index, part in enumerate(parts):
            if part.isdigit():
                found[parts[:index]].add(part)
    places = {
        (*parent, number): str(place)
        for parent, numbers in found.items()
        for place, number in enumerate(sorted(numbers, key=int))
    }

    def counted(name: re.Match[str]) -> str:
        parts = tuple(name.group().split("."))
        return ".".join(places.get(parts[: i + 1], part) for i, part in enumerate(parts))

    return lambda text: _NAME.sub(counted, text)  # one name, or several with commas between
