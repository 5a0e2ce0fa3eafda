"""Saves a checkpoint in the background: training stops only while this rank's shards are copied.

Owns the save that is in flight, at most one per process group, its thread, and where its error
surfaces. The thread is no daemon: a process that ends finishes its save first.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fullshard.checkpoint.process_groups import own_group
from fullshard.checkpoint.saving.staging import snapshot
from fullshard.checkpoint.saving.writing import write
from fullshard.comm import file_access

__all__ = ["PendingSave", "async_save"]


class PendingSave(Future[Path]):
    """A save that is under way: ``result()`` waits for it and returns its folder.

    ``result()`` and ``exception()`` give a ``SaveError`` where any rank failed.

    Attributes:
        seen: whether the caller has asked for the result or the error. The next save raises the
            error of an earlier save for which nobody waited.
    """

    def __init__(self) -> None:
        """Begins."""
        super().__init__()
        self.seen = False

    def result(self, timeout: float | None = None) -> Path:
        """Return the folder once the checkpoint is there; wait ``timeout`` seconds at most."""
        self.exception(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what went wrong, once the save has ended; wait ``timeout`` seconds at most."""
        error = super().exception(timeout)
        self.seen = True
        return error


_NAMED = 4  # entries of a warning
_alone: list[PendingSave] = []
_latest: weakref.WeakKeyDictionary[dist.ProcessGroup, list[PendingSave]] = (
    weakref.WeakKeyDictionary()
)


def async_save(
    state_dict: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Save ``state_dict`` into ``folder`` during training; every rank calls it.

    Returns when this rank's shards are copied to the CPU; a thread writes the copy. The thread
    writes the format of ``torch.distributed.checkpoint``, whose ``load`` reads it onto any mesh.
    Killed at any moment, it leaves a whole checkpoint in ``folder``, the old one or the new one. A
    second save waits, before it copies, until the first one is written. Tensors are neither
    gathered nor sent. Of an entry that is no ``DTensor`` one rank's value is written; a warning
    on the first rank names tensors, numbers and texts of which ranks have different values.

    Args:
        state_dict: what ``torch.distributed.checkpoint.save`` takes; ``get_state_dict`` gives it.
        folder: that of the checkpoint, which may hold an earlier one; on storage of all ranks.
        group: a gloo process group of the ranks that save, which no other code uses during the
            save; None: one that is made for saves, of all ranks.

    Returns:
        The save: call ``result()`` before you read the folder or destroy process groups.

    Raises:
        TypeError: if ``state_dict`` is no mapping.
        SaveError: on every rank, if the previous save failed on any rank and no caller has asked
            for its result.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = own_group("asynchronous saves")
    if group is not None and group.size() == 1:
        group = None
    latest = _alone if group is None else _latest.setdefault(group, [])
    save, error = _Save(before=[*latest], group=group), None
    try:
        with file_access("checkpoint"):
            wait(latest)
            if latest and not latest[0].seen:
                latest[0].result()
            if not isinstance(state_dict, Mapping):
                raise TypeError(f"state_dict is a {type(state_dict).__name__}; pass a dict")
            save.folder = Path(folder)
            save.state = snapshot(state_dict)
    except BaseException as caught:  # the other ranks get the error, in their threads
        save.error = error = caught
        save.pending.seen = True
    latest[:] = [save.pending]
    threading.Thread(target=save.run, name="fullshard async_save").start()
    if error is not None:
        raise error
    return save.pending


@dataclass
class _Save:
    """The work of the thread of a save.

    Attributes:
        before: the save before, in whose collectives this one's must not fall.
        group: the ranks that save; None: this one.
        folder: that of the checkpoint.
        state: the copy of what is saved.
        error: what this rank found wrong, an interrupt included.
        pending: the ``PendingSave`` that receives the result.
    """

    before: Sequence[PendingSave]
    group: dist.ProcessGroup | None
    folder: Path = field(default_factory=Path)
    state: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    pending: PendingSave = field(default_factory=PendingSave)

    def run(self) -> None:
        """Write, with all ranks, or report an error to them."""
        try:
            wait(self.before)
            differing = write(self.state, self.folder, self.group, self.error)
        except BaseException as caught:
            self.pending.set_exception(caught)
            return
        self.pending.set_result(self.folder)
        if differing:
            more = len(differing) - _NAMED
            named = ", ".join(differing[:_NAMED]) + (f" and {more} more" if more > 0 else "")
            warnings.warn(
                f"ranks have different values of {named}, and the checkpoint has those of one "
                "rank. If each rank needs its own, save a DTensor (as for the state of an "
                "optimizer that steps on shards), or give the entries a name for each rank",
                stacklevel=2,
            )
