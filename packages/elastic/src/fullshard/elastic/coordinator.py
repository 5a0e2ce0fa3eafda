"""The coordinator of real runs: torchft's lighthouse and manager.

Owns the manager's server, which rank 0 of a group runs, the clients of all its ranks, and the store
in which groups meet. torchft decides who is alive and when a quorum is there; everything that moves
tensors is ours.

[Note: numbers] A lighthouse that is started again counts quorums from 1. Its groups keep their
stores, in which an old quorum of that number has left its keys. Therefore the number of a quorum is
made here. torchft agrees on the largest ``step`` among the groups and uses it for nothing that
concerns us. Each group passes one more than the last agreed value: it grows with each quorum, and
no two quorums with one store have equal values. The number is the value at which the groups of a
quorum were new.

[Note: one store] torchft gives each local rank the store of another group, in turn. Groups with
different numbers of ranks meet in one store instead: rank 0's. Its other ranks read the address in
the store of their own group.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fullshard.elastic.compat import coordination
from fullshard.elastic.errors import ReplicaGroupError
from fullshard.elastic.membership import Coordinator, Quorum
from fullshard.elastic.options import ElasticOptions

__all__ = ["TorchftCoordinator"]

_HEARTBEAT = timedelta(milliseconds=100)
_ASK_AGAIN = 1.0  # seconds after which a manager asks a lighthouse again that was lost


class TorchftCoordinator(Coordinator):
    """torchft's lighthouse and manager behind the contract of a coordinator.

    A collective call of the group's ranks.

    Args:
        options: names the lighthouse and the group.
        process_group: the ranks of this replica group; None: the default one.

    Raises:
        ModuleNotFoundError: if torchft is not installed.
        ReplicaGroupError: if rank 0 cannot start the manager.
    """

    def __init__(
        self, options: ElasticOptions, process_group: dist.ProcessGroup | None = None
    ) -> None:
        torchft = coordination()
        self._options = options
        self._rank = dist.get_rank(process_group)
        self._server: Any = None
        self._agreed = 0  # see [Note: numbers]
        self._last: tuple[int, tuple[str, ...]] | None = None
        self._quorum: Quorum | None = None
        self._patience = timedelta(seconds=options.timeout)
        told: list[Any] = [None, None, None]
        if self._rank == 0:
            try:
                told[:2] = self._start(torchft, dist.get_world_size(process_group))
            except Exception as error:  # the others wait for an answer
                told[2] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(told, group=process_group, group_src=0)
        port, address, failed = told
        if failed is not None:
            raise ReplicaGroupError(
                f"replica group {options.group}: rank 0 cannot reach the lighthouse at "
                f"{options.lighthouse} or start its manager ({failed}); start "
                "fullshard-lighthouse, and check the address and options.host"
            )
        if self._rank != 0:
            self._store = dist.TCPStore(
                options.host, port, is_master=False, wait_for_workers=False, timeout=self._patience
            )
        self._client: Any = torchft.ManagerClient(address, connect_timeout=self._patience)

    def _start(self, torchft: Any, ranks: int) -> tuple[int, str]:
        """Start the store and the manager of this group; return the port and the address."""
        options = self._options
        self._store = dist.TCPStore(
            options.host, 0, is_master=True, wait_for_workers=False, timeout=self._patience
        )
        started = self._store.add("started", 1)
        port = self._store.port
        self._server = torchft.ManagerServer(
            replica_id=f"{options.group}:{port}.{started}",
            lighthouse_addr=options.lighthouse,
            hostname=options.host,
            bind="[::]:0",
            store_addr=f"{options.host}:{port}",
            world_size=ranks,
            heartbeat_interval=_HEARTBEAT,
            connect_timeout=self._patience,
            # A manager waits the time-out / (retries + 1) before each of them.
            quorum_retries=math.ceil(options.quorum_timeout / _ASK_AGAIN),
        )
        return port, str(self._server.address())

    def quorum(self, step: int, failures: int) -> Quorum:
        """See ``Coordinator``."""
        try:
            found = self._client._quorum(
                group_rank=self._rank,
                step=self._agreed + 1,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=timedelta(seconds=self._options.quorum_timeout),
                commit_failures=failures,
                init_sync=False,
            )
            return self._numbered(found, failures)
        except Exception as error:
            raise ReplicaGroupError(
                f"replica group {self._options.group}, rank {self._rank}, after {step} steps: no "
                f"quorum within {self._options.quorum_timeout} s ({type(error).__name__}: {error});"
                f" check that the lighthouse at {self._options.lighthouse} runs, and that enough "
                "groups are there"
            ) from error

    def _numbered(self, found: Any, failures: int) -> Quorum:
        """Return torchft's quorum with a number; see [Note: numbers]."""
        asked, self._agreed = self._agreed + 1, int(found.max_step)
        last, self._last = self._last, (int(found.quorum_id), tuple(found.replica_ids))
        is_new = last != self._last or asked != self._agreed or failures > 0
        if self._quorum is None or is_new:
            self._quorum = Quorum(
                number=self._agreed,
                names=tuple(found.replica_ids),
                own=int(found.replica_rank),
                store=self._meeting_place(self._agreed, str(found.store_address)),
            )
        return self._quorum

    def _meeting_place(self, number: int, store: str) -> str:
        """Return the address that rank 0 was given; see [Note: one store]."""
        key = f"quorum/{number}"
        if self._rank == 0:
            self._store.set(key, store)
            return store
        return self._store.get(key).decode()

    def agree(self, step: int, ok: bool) -> bool:
        """See ``Coordinator``."""
        # Another rank may still wait for a group that this one has given up.
        patience = timedelta(seconds=2 * self._options.timeout + 5)
        try:
            return bool(self._client.should_commit(self._rank, step, ok, timeout=patience))
        except Exception as error:
            raise ReplicaGroupError(
                f"replica group {self._options.group}, rank {self._rank}, after {step} steps: a "
                f"rank of this group did not vote within {patience.total_seconds()} s "
                f"({type(error).__name__}: {error}); let the launcher start the group again"
            ) from error

    def close(self) -> None:
        """See ``Coordinator``."""
        if self._server is not None:
            self._server.shutdown()
            self._server = None
