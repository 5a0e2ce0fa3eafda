"""Checkpoints in memory, of which the next host has a copy: the front of this room.

``MemoryCheckpoints`` owns the slots of this rank, the save that is in flight and its thread.
``sending`` owns what a save sends, ``finding`` which step a restart takes, ``folder`` the files.
"""

from __future__ import annotations

import logging
import os
import secrets
import warnings
from collections.abc import Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.api import CheckpointException

from fullshard.checkpoint.agreement import format_error
from fullshard.checkpoint.memory.contents import Contents
from fullshard.checkpoint.memory.errors import MemoryCheckpointError, together
from fullshard.checkpoint.memory.finding import file_system_of, find, host_name
from fullshard.checkpoint.memory.folder import (
    AttemptFolder,
    attempts_in,
    default_folder,
    open_run,
)
from fullshard.checkpoint.memory.hosts import Hosts
from fullshard.checkpoint.memory.reading import ValuePlanner
from fullshard.checkpoint.memory.room import Room, free_bytes, missing_room
from fullshard.checkpoint.memory.segments import Manifest, Slot, checksum
from fullshard.checkpoint.memory.sending import Outgoing, complete
from fullshard.checkpoint.process_groups import own_group
from fullshard.checkpoint.saving.async_save import PendingSave

__all__ = ["MemoryCheckpoints"]

_log = logging.getLogger("fullshard.checkpoint")

_open: set[int] = set()
"""Numbers of those that are open: each has a process group, which later ones use again."""


class MemoryCheckpoints:
    """The last steps of a run, in the memory of the hosts; every rank makes one.

    Each rank keeps its own shards and copies of the shards of the previous host. After the loss of
    one host, or of several hosts that are no neighbours, the run still has every shard. The memory
    outlives the processes. As a context manager, the object removes the memory at the end of the
    block; an error leaves the memory.

    Every rank calls each method, in the same order.
    """

    def __init__(
        self,
        run: str,
        *,
        host: str | int | None = None,
        keep: int = 2,
        budget_gb: float | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """Open the memory of a run on this host; nothing is allocated yet.

        Args:
            run: the name of the run, which a restart gives again, such as the number of the job.
            host: a name of this rank's host, equal on all ranks of the host; None: that of the
                system, and of its boot. Neighbours are hosts in the order of their first ranks.
            keep: how many steps are kept, at least 2: one is whole while the next is written.
            budget_gb: GiB that a host may use; None: what is free.
            folder: in which file system, on each host; None: a folder of this user in
                ``/dev/shm``.

        Raises:
            MemoryCheckpointError: on every rank, if the folder of any rank cannot be used, or a
                process uses the memory of a run of this name.
        """
        is_distributed = dist.is_available() and dist.is_initialized()
        several = is_distributed and dist.get_world_size() > 1
        self._number = min(set(range(len(_open) + 1)) - _open)
        self._group = own_group(f"checkpoints in memory {self._number}") if several else None
        self._rank = 0 if self._group is None else self._group.rank()
        self._what = f"the checkpoints in memory of run {run}"
        self._keep = keep
        self._budget = None if budget_gb is None else int(budget_gb * 2**30)
        token = secrets.token_hex(4)
        name = host_name() if host is None else str(host)

        def opened() -> tuple[Path, str, int, tuple[str, int, float | None, str]]:
            if not isinstance(keep, int) or keep < 2:
                raise ValueError(f"keep is {keep!r}; pass 2 or more")
            path = open_run(default_folder() if folder is None else Path(folder), run)
            newest = max(attempts_in(path).values(), default=0)
            return path, name, newest, (run, keep, budget_gb, token)

        told = together(self._group, self._what, opened)
        asked = {each[3][:3] for each in told}
        if len(asked) > 1:
            raise MemoryCheckpointError(
                f"{self._what}: ranks pass different run, keep or budget_gb: "
                f"{', '.join(map(str, sorted(asked, key=str)))}; pass the same on every rank"
            )
        self._hosts = Hosts([each[1] for each in told])
        if several and len(self._hosts.order()) == 1 and self._rank == 0:
            _log.warning("%s: all ranks are on one host, so no host keeps copies", self._what)
        self._token = told[0][3][3]
        self._attempt = 1 + max(each[2] for each in told)
        self._run = told[self._rank][0]
        self._made: list[AttemptFolder] = []
        together(self._group, self._what, self._make)
        self._own = self._slots(self._rank, "own")
        sources = self._hosts.sources(self._rank)
        self._copies = {source: self._slots(source, "copy") for source in sources}
        self._count = 0  # of saves
        self._turn = 0  # complete saves; the next save writes this slot, modulo ``keep``
        self._taken: tuple[str, int] | None = None
        self._is_prepared = False
        self._is_reserved = False
        self._latest: PendingSave | None = None
        # a process that ends finishes its save first
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="fullshard memory")
        _open.add(self._number)

    def _make(self) -> None:
        self._made.append(AttemptFolder(self._run, self._attempt, self._token, self._rank))

    def _slots(self, rank: int, kind: str) -> list[Slot]:
        paths = [self._made[0].slot(rank, number, kind) for number in range(self._keep)]
        return [Slot(path) for path in paths]

    # -- before training --------------------------------------------------------------------------

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Check that all hosts have room for ``keep`` steps, and allocate it.

        Without this call, the first save does so. Segments of earlier attempts stay until the first
        save, and memory is then allocated as they go.

        Args:
            state: as for ``save``.

        Raises:
            MemoryCheckpointError: on every rank, if a host has no room; the text names all hosts
                that have none.
        """
        self._settle()
        folder = self._made[0]

        def room() -> Room:
            nbytes, system = Contents(state).nbytes, file_system_of(self._run)
            return Room(
                nbytes=nbytes,
                system=system,
                folder=str(self._run),
                free=free_bytes(self._run),
                old=folder.old_nbytes(),
                budget=self._budget,
            )

        rooms = together(self._group, self._what, room)
        missing = missing_room(rooms, self._hosts, self._keep)
        if missing:
            raise MemoryCheckpointError(f"{self._what}: {missing}")

        def allocate() -> None:
            for rank, slots in ((self._rank, self._own), *self._copies.items()):
                for slot in slots:
                    slot.allocate(rooms[rank].nbytes)

        if not any(each.old for each in rooms):
            together(self._group, self._what, allocate)
        self._is_reserved = True

    # -- during training --------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any]) -> PendingSave:
        """Keep ``state`` as that of ``step``; return when this rank's shards are copied.

        A thread sends the copy to the next host during training. A second save waits, before
        it copies, until the first one is complete on all ranks. Nothing is gathered.

        Args:
            step: the number of updates so far; a restart takes the last save that is whole.
            state: what ``async_save`` takes. Values that are no ``DTensor`` may differ from rank to
                rank, such as the state of a generator.

        Returns:
            The save: ``result()`` waits until every rank's shards are on two hosts.

        Raises:
            MemoryCheckpointError: on every rank, if the previous save failed on any rank and no
                caller has asked for its result. Also if a host has no room for the first save.
        """
        self._settle()
        if not self._is_prepared:
            if not self._is_reserved:
                self.reserve(state)
            together(self._group, self._what, lambda: self._made[0].remove_old(self._taken))
            self._is_prepared = True
        self._count += 1
        pending, slot = PendingSave(), self._own[self._turn % self._keep]
        written: _Written | None = None
        error: BaseException | None = None
        try:
            contents = Contents(state)
            slot.unseal()
            content = slot.allocate(contents.nbytes)
            contents.copy_to(content)
            written = _Written(self._count, step, contents, content)
        except OSError as caught:  # every rank gets it as the result
            error = caught
        except BaseException as caught:  # the other ranks get the error, in their threads
            pending.seen, error = True, caught
        self._latest = pending
        self._thread.submit(self._run_save, pending, step, written, error)
        if error is not None and pending.seen:
            raise error
        return pending

    def wait(self) -> None:
        """Wait until the save in flight is complete on all ranks.

        Raises:
            MemoryCheckpointError: on every rank, if it failed.
        """
        self._settle()

    def _settle(self) -> None:
        if not self._made[0].is_open:
            raise MemoryCheckpointError(f"{self._what} are closed; make new MemoryCheckpoints")
        if self._latest is not None:
            futures.wait([self._latest])
            if not self._latest.seen:
                self._latest.result()

    def _run_save(
        self,
        pending: PendingSave,
        step: int,
        written: _Written | None,
        error: BaseException | None,
    ) -> None:
        try:
            outgoing = None
            try:
                outgoing = None if written is None else self._outgoing(written)
            except Exception as caught:
                error = caught
            complete(self._group, self._hosts, outgoing, error, f"{self._what}, step {step}")
            if not self._turn:
                self._made[0].remove_old(None)
            self._turn += 1
        except BaseException as caught:
            pending.set_exception(caught)
        else:
            pending.set_result(self._run)

    def _outgoing(self, written: _Written) -> Outgoing:
        manifest = Manifest(
            attempt=self._attempt,
            token=self._token,
            number=written.number,
            step=written.step,
            rank=self._rank,
            ranks=len(self._hosts.names),
            nbytes=written.content.numel(),
            checksum=checksum(written.content),
            entries=written.contents.entries(),
        )
        number = self._turn % self._keep
        copies = {source: slots[number] for source, slots in self._copies.items()}
        return Outgoing(self._own[number], written.content, manifest, copies)

    # -- after a restart --------------------------------------------------------------------------

    def restore(self, state: dict[str, Any]) -> int | None:
        """Load the newest step that is whole into ``state``, and return its number.

        Each rank reads what is in the memory of its host, and receives the rest from ranks of other
        hosts. The number of ranks and hosts may be another one than that of the save; then a rank
        gets the values of the rank of its own number, modulo the number of ranks that saved.
        Segments whose checksum is wrong are logged and not used.

        Args:
            state: as ``torch.distributed.checkpoint.load`` takes it: ``get_state_dict`` gives it,
                and ``set_state_dict`` takes the loaded one.

        Returns:
            The step; None, on every rank, if no step is whole: load a checkpoint from files then.

        Raises:
            MemoryCheckpointError: on every rank, if the step does not fit ``state``.
        """
        self._settle()
        found = find(self._group, self._run, self._what)
        if found is None:
            return None
        try:
            with warnings.catch_warnings():
                # without a group, reading in one process is what is wanted
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load(
                    state,
                    storage_reader=found.reader,
                    planner=ValuePlanner(),
                    process_group=self._group,
                    no_dist=self._group is None,
                )
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            text = f"{self._what}: step {found.step} cannot be loaded: {_cause(error)}"
            raise MemoryCheckpointError(text) from error
        self._taken = found.save
        return found.step

    # -- at the end -------------------------------------------------------------------------------

    def purge(self) -> None:
        """Remove the memory of the run on all hosts, once the save in flight has ended."""
        if self._latest is not None:
            futures.wait([self._latest])
        if self._made[0].is_open:
            together(self._group, self._what, lambda: None)  # no rank reads any more
            together(self._group, self._what, self._made[0].remove)
            self._ended()

    def close(self) -> None:
        """Leave the memory for a restart, once the save in flight has ended on all ranks."""
        if self._latest is not None:
            futures.wait([self._latest])
        if self._made[0].is_open:
            together(self._group, self._what, self._made[0].close)
            self._ended()

    def _ended(self) -> None:
        self._thread.shutdown()
        _open.discard(self._number)

    def __enter__(self) -> MemoryCheckpoints:
        """Return the checkpoints."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the memory, or leave it after an error."""
        if error is None:
            self.purge()
        elif self._latest is None or self._latest.done():  # else other ranks may never answer
            self._made[0].close()
            self._ended()


@dataclass(frozen=True)
class _Written:
    """A copy that is to be sealed and sent.

    Attributes:
        number: of the save.
        step: after which it was made.
        contents: the places of its tensors.
        content: its bytes.
    """

    number: int
    step: int
    contents: Contents
    content: torch.Tensor


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {format_error(first)}"
    return format_error(error)
