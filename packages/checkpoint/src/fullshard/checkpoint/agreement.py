"""What ranks must agree on before the state of an optimizer travels.

Owns telling the error of one rank to all, and one comparison per process group over which a
parameter is spread: every rank raises alike. A rank that holds no part of a parameter has no state
for the parameter. The rank receives an empty state of the kind that other ranks report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.names import StateDict
from fullshard.checkpoint.parts import as_cut
from fullshard.sharding import RankMismatchError, map_tensors
from fullshard.sharding.spi import Comparison, device_of_mesh, is_plain, local_shard, tensors_in

__all__ = ["EXCHANGE", "agree", "agree_over", "format_error", "reporting_errors", "settle"]

EXCHANGE = Comparison(
    what="the agreement on an optimizer's state",
    error="the optimizer's state cannot be exchanged, as some ranks found an error; ",
    mismatch="ranks disagree on the optimizer's state: ",
    advice="Step the same optimizer on the same parameters on every rank",
)
"""What errors of ranks, and differences between them, are told with."""


def format_error(error: BaseException | None) -> str:
    """Return the text of an error for other ranks; nothing if there is none."""
    return "" if error is None else f"{type(error).__name__}: {error}"


@contextmanager
def reporting_errors(report: Callable[[Exception | None], None]) -> Iterator[None]:
    """Call ``report`` with the exception of the ``with`` block, or None; ``report`` raises it."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    report(error)


def agree(params: Mapping[str, torch.Tensor], state: StateDict, error: Exception | None) -> None:
    """Require that all ranks have equal kinds of state for each parameter.

    A rank whose part of a parameter is empty, and that has no state for it, is given some.

    Args:
        params: the optimizer's parameters by name; those that are ``DTensor`` are compared.
        state: per name the state, in which parts are ``DTensor``; may gain names.
        error: what this rank found wrong by itself.

    Raises:
        RankMismatchError: on every rank, naming the first parameter that differs and what each rank
            has, or repeating the errors of other ranks.
        Exception: ``error``.
    """
    spread: dict[dist.ProcessGroup, dict[str, DTensor]] = {}
    for name, param in params.items():
        if isinstance(param, DTensor):
            for process_group in param.device_mesh.get_all_groups():
                spread.setdefault(process_group, {})[name] = param
    verdict = format_error(error)
    for process_group, compared in spread.items():
        found = _verdict(process_group, compared, state, verdict)
        if found.startswith(EXCHANGE.mismatch):  # on all of its ranks: some may have no part
            _fill(process_group, compared, state)
            found = _verdict(process_group, compared, state, verdict)
        verdict = found or verdict
    settle(error, verdict)


def agree_over(
    comparison: Comparison,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    lines: Sequence[str],
    error: BaseException | None,
) -> None:
    """Require that all ranks of a process group have equal lines and no error.

    Args:
        comparison: makes the exchange and words the result.
        process_group: the ranks; None: this one alone.
        device: on which a digest travels.
        lines: what must be equal.
        error: what this rank found.

    Raises:
        RankMismatchError: if ranks differ, or another one has an error.
        Exception: ``error``.
    """
    verdict = ""
    if process_group is not None:
        told = [(line, line) for line in lines]
        verdict = comparison.verdict(told, format_error(error), process_group, device)
    settle(error, verdict)


def settle(error: BaseException | None, verdict: str) -> None:
    """Raise ``error``, or the error that the exchange between ranks found."""
    if error is not None:
        raise error
    if verdict:
        raise RankMismatchError(verdict)


def _verdict(
    process_group: dist.ProcessGroup, params: Mapping[str, DTensor], state: StateDict, known: str
) -> str:
    """Return what is wrong on any rank; nothing if nothing is, or the same on all."""
    lines = [(f"{name}: {_signature(state.get(name))}",) * 2 for name in params]
    device = device_of_mesh(next(iter(params.values())).device_mesh)
    return EXCHANGE.verdict(lines, known, process_group, device)


def _signature(value: Any) -> str:
    """Return what must be equal on all ranks: the key of each part, its kind, how it is cut."""
    said = []
    for key, item in value.items() if isinstance(value, dict) else [("", value)]:
        for part in tensors_in(item):
            if isinstance(part, DTensor):
                local = local_shard(part)
                kind = part.dtype if is_plain(local) else type(local).__name__
                said.append(f"{key} {kind} {tuple(part.shape)} as {part.placements}")
    return ", ".join(said) or ("no state" if value is None else "no parts")


def _fill(
    process_group: dist.ProcessGroup, params: Mapping[str, DTensor], state: StateDict
) -> None:
    """Give a rank with an empty part, and no state for it, the state that the first rank has."""
    known = [{name: map_tensors(_outline, state[name]) for name in params if name in state}]
    dist.broadcast_object_list(known, group=process_group, group_src=0)
    for name, value in known[0].items():
        if name not in state and local_shard(params[name]).numel() == 0:
            state[name] = map_tensors(partial(_empty_part, params[name]), value)


def _outline(tensor: torch.Tensor) -> torch.Tensor:
    is_part = isinstance(tensor, DTensor)
    return torch.empty(0, dtype=tensor.dtype, device="meta") if is_part else tensor.detach().cpu()


def _empty_part(param: DTensor, like: torch.Tensor) -> torch.Tensor:
    return as_cut(param, local_shard(param).detach().to(like.dtype)) if like.is_meta else like
