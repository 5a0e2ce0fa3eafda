"""torch's private names and what differs between its releases, in one place.

Owns every name that torch does not promise. Versions are never compared; features are tested for.

- ``torch.testing._internal.distributed.fake_pg.FakeStore`` (2.11, 2.13): a store without
  a server, for a world of one real rank and many simulated ranks. Its module registers the
  backend ``fake``.
- ``ProcessGroup.unbox``, ``_resolve_process_group`` (2.11, 2.13): the group that a collective's
  operator was called with.
- ``torch.utils._python_dispatch.TorchDispatchMode`` (2.11, 2.13): sees each operation.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DispatchMode", "group_size", "lonely_store"]


class DispatchMode(TorchDispatchMode):
    """A context whose `__torch_dispatch__` is asked to run each operation of this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def lonely_store() -> dist.Store:
    """A store for a world in which only this rank is there."""
    return FakeStore()


def group_size(argument: Any) -> int | None:
    """How many ranks the group has that an operator was called with; None if it is no group.

    Operators take a group as a script object, or its name.
    """
    try:
        if isinstance(argument, str):
            resolve: Any = dist.distributed_c10d._resolve_process_group
            return int(resolve(argument).size())
        return int(dist.ProcessGroup.unbox(argument).size())
    except (AttributeError, TypeError, RuntimeError):
        return None
