"""A process group whose collectives return at once and move nothing.

Owns the backend named ``silent``. A collective leaves its output unchanged, so values have no
meaning in such a group; sizes, memory, and the work of the one rank do. torch's own ``fake``
backend is the other one for wide worlds (``Settings.wide_group``): in torch 2.13 its gathers copy
the input once for each rank. At 1024 ranks a collective takes about 1 ms, so a step with a hundred
collectives takes about twice the time of its other work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["SILENT", "SilentGroup", "listening", "register_silent_backend"]

SILENT = "silent"

Tensors = Sequence[torch.Tensor]
Listener = Callable[[str, Any, Any, int], None]


class _Done(dist.Work):
    """Handle of a collective that is complete at once."""

    def is_completed(self) -> bool:
        """True."""
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True, at once."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future with the result, for DDP."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self._result = result


_DONE = _Done()  # one handle for all collectives without a result


# torch declares overloads that nothing calls, so that no override of its methods fits them all.
_ProcessGroup: Any = dist.ProcessGroup


class SilentGroup(_ProcessGroup):  # type: ignore[misc]  # Any: see above
    """One rank's end of a group that moves nothing. The names of the methods are torch's."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = SILENT

    @property
    def group_name(self) -> str:
        """The name under which torch looks it up."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        """The backend's name."""
        return SILENT

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Give every rank this rank's tensor: constructors compare sizes by it."""
        for each, tensor in zip(outputs, inputs, strict=True):
            for output in each:
                output.copy_(tensor)
        return _DONE

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Leave the tensors alone."""
        _tell("all_reduce", tensors, (), self)
        return _Done(list(tensors))

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Leave the output alone; one tensor, or a list of them."""
        _tell("all_gather", output, input, self)
        return _DONE

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Leave the output alone; one tensor, or a list of them."""
        _tell("reduce_scatter", input, output, self)
        return _DONE

    def all_to_all_single(self, output: Any, input: Any, *sizes: Any) -> dist.Work:
        """Leave the output alone."""
        _tell("all_to_all", output, input, self)
        return _DONE

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Leave the tensors alone."""
        _tell("broadcast", tensors, (), self)
        return _DONE

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Leave the tensors alone."""
        _tell("reduce", tensors, (), self)
        return _DONE

    def barrier(self, *args: Any) -> dist.Work:
        """Wait for nobody."""
        return _DONE

    allreduce_coalesced = allreduce
    # More names of torch's for the same calls: 2.13's, then those of 2.11.
    all_gather_single_coalesced = all_gather_single
    reduce_scatter_single_coalesced = reduce_scatter_single
    _allgather_base = allgather_into_tensor_coalesced = all_gather_single
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = reduce_scatter_single
    alltoall_base = all_to_all_single


_listener: Listener | None = None


def _tell(kind: str, full: Any, buffers: Any, group: SilentGroup) -> None:
    if _listener is not None:
        _listener(kind, full, buffers, group.size())


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Return a context; `listener` receives each collective: kind, larger side, other, ranks."""
    global _listener
    _listener = listener
    try:
        yield
    finally:
        _listener = None


def register_silent_backend() -> None:
    """Let ``new_group`` and ``init_process_group`` make silent groups; again does nothing."""
    if SILENT.upper() not in {name.upper() for name in dist.Backend.backend_list}:
        dist.Backend.register_backend(SILENT, _make_group, devices=["cpu", "cuda"])


def _make_group(store: object, rank: int, size: int, timeout: timedelta) -> SilentGroup:
    return SilentGroup(rank, size)
