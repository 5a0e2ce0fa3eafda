"""Detection and report of ranks that do not call equal collectives.

Owns the communication of debug mode over the store: each rank announces its next collective, and
launches it after all ranks of the process group have announced an equal one. Refuses: launching
anything, and deciding when it is on; ``debugging`` does that.

[Note: desync detection] Debug mode is turned on in sessions, and a session has epochs. In an epoch,
the ranks of a process group count their collectives. For number n they share one verdict, which the
first to write it decides, so that either all ranks launch number n or none does. The verdict is
"ok" if all ranks announced equal calls. The verdict is an error in four cases: calls differ, a
missing rank of this host has ended, a rank waited longer than its timeout, or the epoch has an
alarm. The alarm is one text per epoch for all process groups: the first error, or the notice of a
rank that left its operation. A rank that raised or left continues in the next epoch with new
counts; other ranks raise at their next collective and continue there too.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from fullshard.comm import CollectiveMismatchError
from fullshard.comm.spi import Launch, ProcessWatch, this_process
from fullshard.insight.calls import said, say_ranks, says

__all__ = ["DesyncDetector"]

_OK = "ok"
_DIFFERS = 1 << 32  # a rank adds this to the count if its call differs from the first call
_SHORTEST, _LONGEST = 2e-5, 5e-3  # seconds between two looks at the store
_FIRST_LOOK, _BETWEEN_LOOKS = 0.05, 1.0  # seconds before and between looks for ended processes
_PER_RANK = 1e-4  # seconds by which the longest grows with the ranks that look


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """The meeting of a process group before its collective ``number`` of an epoch.

    Attributes:
        group: the name of the process group, as all its ranks know it.
        members: their global ranks.
        epoch: the numbers of the session and of the epoch.
        number: how many collectives the group had before in the epoch.
    """

    group: str
    members: Sequence[int]
    epoch: str
    number: int

    def key(self, what: str) -> str:
        return f"{self.epoch}/{self.group}/{self.number}/{what}"


class DesyncDetector:
    """One rank's part in the meetings of all its process groups."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        """Join the other ranks; every rank of the world must do this once.

        Args:
            store: reached by all ranks; keys have a prefix of their own.
            rank: this one's global number.
            world_size: how many there are.
        """
        joined = int(store.add("fullshard/debug/joined", 1))
        # Keys of a destroyed world may remain in a store that the next world uses.
        prefix = f"fullshard/debug/{(joined - 1) // world_size}"
        self._store: dist.Store = dist.PrefixStore(prefix, store)
        self._rank = rank
        self._session = 0
        self._epoch = 0
        self._counts: dict[str, int] = {}
        self._places: dict[str, dict[str, Any]] = {}
        self._last = ""
        self._past: dict[str, _Meeting] = {}
        self._failure = ""
        self._departed = ""
        self._lock = threading.Lock()
        self._watch = ProcessWatch()

    @property
    def _now(self) -> str:
        """The present epoch, as all ranks name it."""
        return f"{self._session}.{self._epoch}"

    # -- announcements of this rank ---------------------------------------------------------------

    def begin(self) -> None:
        """Start a session and forget the earlier one; all ranks have equally many sessions."""
        with self._lock:
            self._session += 1
            self._epoch = 0
            self._counts.clear()
            self._places.clear()
            self._last = self._failure = self._departed = ""
            self._announce()

    def meet(self, call: Launch, process_group: dist.ProcessGroup, timeout: float) -> None:
        """Return once all ranks of ``process_group`` came with ``call``; they may launch it.

        Args:
            call: what this rank is about to launch.
            process_group: with whom.
            timeout: seconds to wait for the last of them.

        Raises:
            CollectiveMismatchError: on all ranks with equal text, if a rank has another call, does
                not arrive or gave up; and again at each further call, until ``resume``.
            ValueError: if torch.distributed does not know the process group.
        """
        if process_group.size() == 1:
            return
        group, members = str(process_group.group_name), _members(process_group)
        if self._failure:
            raise CollectiveMismatchError(self._failure)
        try:
            verdict = self._verdict(group, members, call, timeout)
        except RuntimeError as error:
            self._failure = (
                f"rank {self._rank} {says(call)}, but cannot ask the others what they do, as the "
                f"store of torch.distributed does not answer ({error}): the process that holds it, "
                "rank 0's most often, has probably ended; its own error says why"
            )
            raise CollectiveMismatchError(self._failure) from error
        if verdict != _OK:
            self._failure = verdict
            raise CollectiveMismatchError(verdict)

    def depart(self, reason: str) -> None:
        """Notify waiting ranks that this rank gave up, and start a new epoch.

        A rank sends no second notice if it failed in a meeting, or if it has not come to a meeting
        since its last notice.

        Args:
            reason: what happened, as in "raised ValueError: no such token".
        """
        if self._departed:
            return
        if not self._failure:
            with contextlib.suppress(RuntimeError):  # the reason is on its way to the user
                with self._lock:
                    self._departed = reason
                    self._announce()
                self._sound_alarm(self._whereabouts(self._record(self._rank)), is_report=False)
        self._start_anew(reason)

    def resume(self) -> None:
        """Start a new epoch after a failed meeting; do nothing if no meeting failed."""
        if self._failure:
            self._start_anew("raised the error of a collective that ranks disagree on")

    def _start_anew(self, reason: str) -> None:
        with self._lock:
            self._epoch += 1
            self._counts.clear()
            self._failure = ""
            self._departed = reason

    def _sound_alarm(self, text: str, *, is_report: bool) -> str:
        """The report that stands: that of the first alarm of the epoch, if it was one."""
        mine = json.dumps([is_report, text])
        first = self._store.compare_set(f"{self._now}/alarm", "", mine)
        first_is_report, first_text = json.loads(first)
        return first_text if first_is_report else text

    # -- one meeting ------------------------------------------------------------------------------

    def _verdict(self, group: str, members: Sequence[int], call: Launch, timeout: float) -> str:
        text = json.dumps(asdict(call))
        with self._lock:
            number = self._counts.get(group, 0)
            self._counts[group] = number + 1
            meeting = _Meeting(group=group, members=members, epoch=self._now, number=number)
            past = self._past.get(group)
            self._past[group] = meeting
            self._last = group
            self._departed = ""
            self._places[group] = {"meeting": vars(meeting), "call": asdict(call)}
            self._announce()
        first = self._store.compare_set(meeting.key("first"), "", text).decode()
        came = self._store.add(meeting.key("count"), 1 if first == text else 1 + _DIFFERS)
        if came % _DIFFERS < len(members):
            return self._wait(meeting, timeout)
        verdict = self._decide(meeting, _OK if came < _DIFFERS else self._disagreement(meeting))
        if past is not None:  # all ranks are here, so no rank reads the old keys
            for each in ("first", "count", "verdict"):
                self._store.delete_key(past.key(each))
        return verdict

    def _decide(self, meeting: _Meeting, verdict: str) -> str:
        """The verdict that stands: this one, unless another rank was first."""
        if verdict != _OK:
            verdict = self._sound_alarm(verdict, is_report=True)
        return self._store.compare_set(meeting.key("verdict"), "", verdict).decode()

    def _wait(self, meeting: _Meeting, timeout: float) -> str:
        now = time.monotonic()
        end, look = now + timeout, now + _FIRST_LOOK
        pause = _SHORTEST
        alarm = f"{meeting.epoch}/alarm"
        longest = _LONGEST + _PER_RANK * len(meeting.members)
        while not self._store.check([meeting.key("verdict")]):
            if self._store.check([alarm]):
                is_report, text = json.loads(self._store.get(alarm))
                return self._decide(meeting, text if is_report else self._absence(meeting, text))
            now = time.monotonic()
            if now > end:
                return self._decide(meeting, self._absence(meeting, "", timeout))
            if now > look:
                look = now + _BETWEEN_LOOKS
                ended = self._ended(meeting)
                if ended:
                    return self._decide(meeting, self._absence(meeting, ended))
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return self._store.get(meeting.key("verdict")).decode()

    def _ended(self, meeting: _Meeting) -> str:
        """Return a description of the missing ranks that have ended."""
        _, missing = self._arrived(meeting)
        return "; ".join(
            self._whereabouts({**record, "left": record["left"] or "has ended"})
            for record in missing
            if self._watch.has_ended(record.get("process"))
        )

    # -- the report -------------------------------------------------------------------------------

    def _announce(self) -> None:
        record = {
            "rank": self._rank,
            "session": self._session,
            "places": self._places,
            "last": self._last,
            "left": self._departed,
            "process": this_process(),
        }
        self._store.set(f"rank/{self._rank}", json.dumps(record))

    def _record(self, rank: int) -> dict[str, Any]:
        """Return the last announcement of ``rank``; without places if not from this session."""
        if self._store.check([f"rank/{rank}"]):
            record: dict[str, Any] = json.loads(self._store.get(f"rank/{rank}"))
            if record["session"] == self._session:
                return record
        return {"rank": rank, "places": {}, "last": "", "left": ""}

    def _arrived(self, meeting: _Meeting) -> tuple[dict[int, Launch], list[dict[str, Any]]]:
        """Return the calls of arrived ranks, by rank, and the records of missing ranks."""
        came, missing = {}, []
        for rank in meeting.members:
            record = self._record(rank)
            place = record["places"].get(meeting.group)
            if place and _Meeting(**place["meeting"]).key("") == meeting.key(""):
                came[rank] = Launch(**place["call"])
            else:
                missing.append(record)
        return came, missing

    def _disagreement(self, meeting: _Meeting) -> str:
        came, _ = self._arrived(meeting)
        return (
            f"ranks issue different collectives: {said(came)}. None of them was launched. Run the "
            "same modules in the same order, with the same settings, on every rank"
        )

    def _absence(self, meeting: _Meeting, alarm: str, timeout: float = 0.0) -> str:
        came, missing = self._arrived(meeting)
        if alarm:
            return f"{alarm}. Meanwhile {said(came)}; that was not launched"
        if not missing:
            return (
                f"{said(came)}, but the last of them came more than {timeout:g} s after the "
                "first. Nothing was launched. If a rank is only slow, use a longer timeout"
            )
        where = "; ".join(self._whereabouts(record) for record in missing)
        return (
            f"{said(came)}, but {say_ranks(record['rank'] for record in missing)} did not come "
            f"within {timeout:g} s: {where}. Nothing was launched. Run the same modules in the "
            "same order on every rank; if a rank is only slow, use a longer timeout"
        )

    def _whereabouts(self, record: Mapping[str, Any]) -> str:
        """Describe the position of a missing rank, or why it left."""
        rank, place = record["rank"], record["places"].get(record["last"])
        if place is None:
            if not record["left"]:
                return f"rank {rank} has not come to any collective in debug mode"
            return f"rank {rank} {record['left']}, before its first collective"
        call = Launch(**place["call"])
        if record["left"]:
            return f"rank {rank} {record['left']}, after its last collective: {says(call, 2)}"
        meeting = _Meeting(**place["meeting"])
        others = say_ranks(other for other in meeting.members if other != rank)
        # as it is; a key that is not there, or not any more, is left alone
        verdict = self._store.compare_set(meeting.key("verdict"), "none", "none").decode()
        if meeting.epoch != self._now or verdict == _OK:
            return f"rank {rank} last {says(call, 2)}, with {others}"
        return f"rank {rank} waits for {others} to {says(call, 1)}"


def _members(process_group: dist.ProcessGroup) -> list[int]:
    try:
        return dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError, RuntimeError) as error:
        raise ValueError(
            "debug mode got a process group that torch.distributed does not know; make it "
            "with torch.distributed.new_group, or turn debug mode off around its use"
        ) from error
