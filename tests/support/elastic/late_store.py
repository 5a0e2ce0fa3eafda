"""A store whose reader gets addresses late."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["LateStore"]


class LateStore(dist.Store):
    """A store that gives no address while another rank may yet leave, at most for a second."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.saw_a_rank_leave = False

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys)

    def get(self, key: str) -> bytes:
        found = self._store.get(key)
        try:
            self._store.wait(["left"], timedelta(seconds=1))
            self.saw_a_rank_leave = True
        except dist.DistStoreError:
            pass
        return found
