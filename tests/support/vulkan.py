"""The device ``vulkan`` of torchvulkan: what tests on it need.

Import nothing of torchvulkan here: the package adds a device to every process that imports it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist


def is_installed() -> bool:
    return importlib.util.find_spec("torchvulkan") is not None


def vulkan() -> Any:
    """Add the device to this process, and return its module."""
    return importlib.import_module("torchvulkan")


_STAGED = "staged"


class _Done(dist.Work):
    """The handle of a collective that is over."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


# torch declares overloads that nothing calls, so that no override of its methods fits them all.
_ProcessGroup: Any = dist.ProcessGroup


class _Staged(_ProcessGroup):  # type: ignore[misc]  # Any: see above
    """A process group written in Python: gloo's collectives on copies in the host's memory."""

    def __init__(self, gloo: Any) -> None:
        super().__init__(gloo.rank(), gloo.size())
        self._gloo = gloo

    @property
    def group_name(self) -> str:
        """The name that torch gave it, which the constructor for Python's groups does not set."""
        name: str = dist.distributed_c10d._world.pg_names[self]
        return name

    def getBackendName(self) -> str:
        return _STAGED

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, options: Any = None
    ) -> dist.Work:
        gathered = torch.empty(output.shape, dtype=output.dtype)
        self._gloo._allgather_base(gathered, input.cpu()).wait()
        output.copy_(gathered)
        return _Done()

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, options: Any
    ) -> dist.Work:
        average = options.reduceOp == dist.ReduceOp.AVG  # gloo has no average
        options.reduceOp = dist.ReduceOp.SUM if average else options.reduceOp
        reduced = torch.empty(output.shape, dtype=output.dtype)
        self._gloo._reduce_scatter_base(reduced, input.cpu(), options).wait()
        output.copy_(reduced / self.size() if average else reduced)
        return _Done()


def staged_group() -> dist.ProcessGroup:
    """Return a group of all ranks that serves the device by copies in the host's memory."""
    if _STAGED not in dist.Backend.backend_list:
        served = ["cpu", "vulkan"]
        dist.Backend.register_backend(_STAGED, _create, extended_api=True, devices=served)
    group: dist.ProcessGroup = dist.new_group(backend=_STAGED)
    return group


def _create(options: Any, backend_options: Any) -> _Staged:
    """Return the group of one rank, from what ``new_group`` knows."""
    rank, size = options.group_rank, options.group_size
    return _Staged(dist.ProcessGroupGloo(options.store, rank, size, options.timeout))


class _Stream:
    """The one queue of the device, as a stream that nobody has to wait for."""

    def __init__(self, *given: object, **named: object) -> None:
        self.device = torch.device("vulkan", 0)

    def record_event(self, event: object = None) -> object:
        return event or _Event()

    def _nothing(self, *given: object) -> None:
        """Order nothing: the queue is in order."""

    wait_event = wait_stream = _nothing

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *given: object) -> None:
        pass


class _Event:
    """A point in the one queue."""

    def __init__(self, *given: object, **named: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    wait = record


@contextmanager
def streams_for_torch() -> Iterator[None]:
    """Give the device streams that do nothing: torch's own ``fully_shard`` needs streams."""
    queue = _Stream()

    def current(device: object = None) -> _Stream:
        return queue

    def within(stream: _Stream) -> _Stream:
        return stream

    names: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": current,
        "stream": within,
    }
    with patch.multiple(vulkan(), create=True, **names):
        yield
