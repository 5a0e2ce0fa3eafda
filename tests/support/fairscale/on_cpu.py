"""FairScale's wrapper on CPU ranks: CPU and gloo answer for CUDA and NCCL."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist


class _Stream:
    """All work is in order: there is one stream, and nothing to wait for."""

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


def _same(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _reduce_scatter(output: torch.Tensor, given: torch.Tensor, group: Any = None) -> None:
    dist.reduce_scatter_tensor(output.view(-1), given.reshape(-1), group=group)


_STAND_INS: list[tuple[Any, str, Any]] = [
    (torch.cuda, "is_available", lambda: True),
    (torch.cuda, "Stream", _Stream),
    (torch.cuda, "current_stream", _Stream),
    (torch.cuda, "stream", lambda stream: nullcontext()),
    (torch.cuda, "synchronize", _nothing),
    (torch.cuda, "current_device", lambda: 0),
    (torch.cuda, "get_rng_state", _nothing),
    (torch.cuda, "set_rng_state", _nothing),
    (torch.Tensor, "record_stream", _nothing),
    (torch.Tensor, "pin_memory", _same),
    (torch.Tensor, "cuda", _same),
    (dist, "_reduce_scatter_base", _reduce_scatter),
]


@contextmanager
def fairscale_on_cpu() -> Iterator[None]:
    """Lets FairScale run inside a ``with`` block; give its wrapper ``compute_device``, the CPU."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for owner, name, stand_in in _STAND_INS:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield
