"""The agreement of a model's ranks before and after they read or write weights.

Owns one comparison over each axis of each mesh, so that what one rank finds wrong raises on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.agreement import format_error, settle
from fullshard.checkpoint.transfer import Sender
from fullshard.checkpoint.weights.tensors import ModelTensor
from fullshard.comm import waiting
from fullshard.sharding.spi import Comparison, device_of_mesh

__all__ = ["LOADING", "SAVING", "agree_on_writes", "agree_over_meshes", "attempt"]

T = TypeVar("T")

LOADING = Comparison(
    what="the agreement on weights to load",
    error="the weights cannot be loaded, as some ranks found an error; ",
    mismatch="ranks disagree on the weights to load: ",
    advice="Pass the same files and the same arguments on every rank",
)
"""What errors of ranks, and differences between them, are told with."""

SAVING = Comparison(
    what="the agreement on weights to save",
    error="the weights cannot be saved, as some ranks found an error; ",
    mismatch="ranks disagree on the weights to save: ",
    advice="Pass the same model and the same arguments on every rank",
)
"""As ``LOADING``."""


def attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of ``call``, or its error, which all ranks learn before any raises."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def agree_on_writes(sender: Sender | None, error: BaseException | None) -> None:
    """Return if no rank found an error; an ``OSError`` of any rank raises alike on every rank.

    Args:
        sender: has the process group; None: this rank is alone.
        error: what this rank found.

    Raises:
        OSError: on every rank, with the errors of all ranks.
        RankMismatchError: on a rank that found none, if another found an error of another class.
        Exception: ``error``.
    """
    verdict = ""
    if sender is not None:
        verdict = SAVING.verdict([], format_error(error), sender.process_group, sender.device)
    if sender is not None and verdict:
        mine = error.errno if isinstance(error, OSError) else None
        codes = [mine] * sender.process_group.size()
        with waiting("agreement"):
            dist.all_gather_object(codes, mine, group=sender.process_group)
        code = next((each for each in codes if each is not None), None)
        if code is not None:
            raise OSError(code, verdict) from error
    settle(error, verdict)


def agree_over_meshes(
    tensors: Iterable[ModelTensor], said: Mapping[str, str], error: Exception | None
) -> None:
    """Return if no rank of the meshes of ``tensors`` found an error, and all say the same.

    Args:
        tensors: the model's; ranks may have some that others do not have, on meshes of their own.
        said: what must be equal, by the name of the tensor.
        error: what this rank found.

    Raises:
        RankMismatchError: on every rank that found none itself.
        Exception: ``error``.
    """
    lines: dict[DeviceMesh, list[str]] = {}
    for each in tensors:
        if isinstance(each.tensor, DTensor) and each.tensor.device_mesh.get_coordinate():
            on_mesh = lines.setdefault(each.tensor.device_mesh, [])
            if each.name in said:
                on_mesh.append(said[each.name])
    verdict = format_error(error)
    for mesh, compared in lines.items():
        told, device = [(line, line) for line in compared], device_of_mesh(mesh)
        for process_group in mesh.get_all_groups():
            verdict = LOADING.verdict(told, verdict, process_group, device) or verdict
    settle(error, verdict)
