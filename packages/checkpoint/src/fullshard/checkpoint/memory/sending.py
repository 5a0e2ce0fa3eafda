"""The part of a save that runs during training: seal, send to the next host, agree.

Owns the messages of a save. [Note: one save after the other] A slot is written again only after the
previous save is complete on all ranks. So the step of the previous save is whole at any moment. All
ranks report to the first rank three times: the size of their segments, whether they have room for
copies, and whether all segments are sealed. The first rank answers with the errors of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.checkpoint.agreement import format_error
from fullshard.checkpoint.memory.errors import MemoryCheckpointError
from fullshard.checkpoint.memory.hosts import Hosts
from fullshard.checkpoint.memory.segments import Manifest, Slot, checksum
from fullshard.checkpoint.saving.meeting import LostRanksError, Meeting

__all__ = ["Outgoing", "complete"]

_CHUNK = 1 << 30  # bytes of a message
_TAG = 11


@dataclass(frozen=True)
class Outgoing:
    """The segment of one rank and one step, and the slots for copies.

    Attributes:
        slot: with its shards.
        content: the bytes of the slot.
        manifest: of the slot.
        copies: by rank of the previous host, the slot for its shards.
    """

    slot: Slot
    content: torch.Tensor
    manifest: Manifest
    copies: dict[int, Slot]


def complete(
    group: dist.ProcessGroup | None,
    hosts: Hosts,
    outgoing: Outgoing | None,
    error: BaseException | None,
    what: str,
) -> None:
    """Seal and send; return on every rank when all ranks have sealed everything.

    Args:
        group: the ranks, all of which call this; None: there is one.
        hosts: of the ranks.
        outgoing: of this rank; None: it has failed.
        error: what this rank found wrong before.
        what: begins the text of an error.

    Raises:
        MemoryCheckpointError: on every rank, if any of them failed, or was lost.
    """
    meeting = Meeting(group)
    packed = b""
    try:
        if outgoing is not None:
            packed = outgoing.manifest.packed()
            outgoing.slot.seal(packed)
    except Exception as caught:
        error = error or caught
    try:
        sizes = (len(packed), outgoing.manifest.nbytes if outgoing else 0)
        told = _agreed(meeting, sizes, error, what)
        if group is None or outgoing is None:
            return
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        try:
            for source, slot in outgoing.copies.items():
                slot.unseal()
                content = slot.allocate(told[source][1])
                copies[source] = (torch.empty(told[source][0], dtype=torch.uint8), content)
        except Exception as caught:
            error = caught
        _agreed(meeting, None, error, what)
        try:
            _exchange(group, hosts.target(meeting.rank), packed, outgoing, copies)
        except Exception as caught:  # a peer is lost, or memory is damaged
            error = caught
        _agreed(meeting, None, error, what)
    except LostRanksError as lost:
        cure = "Restart the job, and restore"
        raise MemoryCheckpointError(f"{what}: {lost}. {cure}", lost=lost.ranks) from lost


def _agreed(
    meeting: Meeting, mine: tuple[int, int] | None, error: BaseException | None, what: str
) -> Sequence[tuple[int, int]]:
    """Return what all ranks tell, or raise their errors."""

    def answer(told: Sequence[tuple[object, str]]) -> tuple[list[object], str]:
        errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(told) if text]
        return [value for value, _ in told], "; ".join(errors)

    values, verdict = meeting.ask((mine, format_error(error)), answer)
    if verdict:
        raise MemoryCheckpointError(f"{what}: {verdict}") from error
    return values  # type: ignore[return-value]  # pairs where this rank gave one


def _exchange(
    group: dist.ProcessGroup,
    target: int | None,
    packed: bytes,
    outgoing: Outgoing,
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> None:
    works = []
    if target is not None:
        manifest = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        for part in (manifest, *outgoing.content.split(_CHUNK)):
            works.append(dist.isend(part, group=group, group_dst=target, tag=_TAG))
    for source, (manifest, content) in copies.items():
        for part in (manifest, *content.split(_CHUNK)):
            works.append(dist.irecv(part, group=group, group_src=source, tag=_TAG))
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
    for source, (manifest, content) in copies.items():
        sealed = manifest.numpy().tobytes()
        slot = outgoing.copies[source]
        received = _unpacked(sealed)
        if checksum(content) != received.checksum:
            raise ValueError(f"the shards of rank {source} arrived with another checksum")
        slot.seal(sealed)


def _unpacked(sealed: bytes) -> Manifest:
    found = Manifest.unpacked(sealed)
    if found is None:
        raise ValueError("a manifest arrived damaged")
    return found
