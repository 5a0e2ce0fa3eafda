"""Compare what ranks say, line by line: one digest per rank travels, the lines only if it differs.

``Comparison`` makes the exchange and the text of the result. The caller chooses the lines to
compare, and raises: ranks of other process groups may still wait for theirs. An exchange also
compares the jobs of ranks; see [Note: two jobs] in ``job``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm import AllGather, EventKind, check_collective
from fullshard.sharding.base.exchange import numbers_of_ranks, objects_of_ranks
from fullshard.sharding.base.job import OTHER_JOBS, differing_jobs, job_of_this_rank

__all__ = ["Comparison", "Line", "RankMismatchError"]

Line = tuple[str, str]
"""What is compared; what is said."""

_DIGEST_BYTES = 8


class RankMismatchError(RuntimeError):
    """Ranks disagree on what is sharded, or how; raised on every rank of the mesh."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The subject of a comparison, in the words of its errors.

    Attributes:
        what: in debug mode's account of collectives.
        error: what comes before errors that some ranks found by themselves.
        mismatch: what comes before the first line that differs.
        advice: what to do about that.
    """

    what: str
    error: str
    mismatch: str
    advice: str

    def verdict(
        self,
        lines: Iterable[Line],
        found: str,
        process_group: dist.ProcessGroup,
        device: torch.device,
        plug_in: AllGather | None = None,
    ) -> str:
        """Return what the ranks disagree on; nothing if they agree, on an error too.

        Args:
            lines: what must be equal on all ranks.
            found: an error of this rank, or what an earlier comparison found.
            process_group: the ranks that compare.
            device: the device on which the ranks compute.
            plug_in: the collective for the digest if the group serves neither the CPU nor
                ``device``.
        """
        if dist.get_world_size(process_group) == 1:
            return ""
        mine = [*([(f"error: {found}",) * 2] if found else []), *lines]
        job = job_of_this_rank()
        text = "\n".join([job, *(compared for compared, _ in mine)])
        digest = hashlib.sha256(text.encode()).digest()
        number = int.from_bytes(digest[:_DIGEST_BYTES], signed=True)
        check_collective(EventKind.ALL_GATHER, self.what, process_group, nbytes=_DIGEST_BYTES)
        if set(numbers_of_ranks(number, process_group, device, plug_in)) == {number}:
            return ""
        everyone = objects_of_ranks((job, mine), process_group, device, plug_in)
        by_rank = dict(zip(dist.get_process_group_ranks(process_group), everyone, strict=True))
        jobs = differing_jobs({rank: told for rank, (told, _) in by_rank.items()})
        return jobs or self._explained({rank: lines for rank, (_, lines) in by_rank.items()})

    def _explained(self, everyone: dict[int, list[Line]]) -> str:
        """Return the first difference; an empty string if only the job tokens differ.

        Args:
            everyone: the lines of each rank, by global rank.
        """
        errors = {
            rank: lines[0][1].removeprefix("error: ")
            for rank, lines in everyone.items()
            if lines and lines[0][1].startswith("error: ")
        }
        for text in errors.values():
            if text.startswith((self.error, self.mismatch, OTHER_JOBS)):
                return text  # from an earlier exchange
        if errors:
            return self.error + "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())
        for index in range(max(len(lines) for lines in everyone.values())):
            column = {
                rank: lines[index] if index < len(lines) else ("nothing more",) * 2
                for rank, lines in everyone.items()
            }
            if len({compared for compared, _ in column.values()}) > 1:
                said = "; ".join(f"rank {rank} has {line}" for rank, (_, line) in column.items())
                return f"{self.mismatch}{said}. {self.advice}"
        return ""
