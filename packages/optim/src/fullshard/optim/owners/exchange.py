"""Exchanges: each rank gives each other one values of any number, all in one launch.

Owns: the choice between memory that the ranks of one host share and the process group's all-to-all,
and the layout of both. A value in shared memory is written once and read there; through sockets it
is copied four times. Refuses: knowing what values are; callers write and read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fullshard.comm import EventKind, PeerLostError, check_collective
from fullshard.comm.spi import SeveralWorks, default_transport, emit

__all__ = ["Access", "ExchangeInFlight", "ValueExchange"]

Access = Callable[[Mapping[int, torch.Tensor]], None]
"""What a caller does with its values, flat, by the rank that they go to or come from."""


@dataclass(frozen=True, slots=True)
class ExchangeInFlight:
    """An exchange that was launched.

    Attributes:
        work: the handle of the collective.
        name: what the values are.
    """

    work: dist.Work
    name: str

    def wait(self) -> None:
        """Return once this rank has read what the others gave.

        Raises:
            PeerLostError: where ranks share memory, if one has ended or does not come in time.
        """
        with _saying_where(self.name):
            self.work.wait()


class ValueExchange:
    """Values that go from each rank of a process group to each other one, launch after launch."""

    def __init__(
        self,
        numels: Mapping[tuple[int, int], int],
        dtype: torch.dtype,
        device: torch.device,
        process_group: dist.ProcessGroup,
        name: str,
    ) -> None:
        """Plan it; a collective call, the first time for these ranks.

        Args:
            numels: how many values go from one rank to another, by their ranks in the process
                group: equal, and in equal order, on all ranks.
            dtype: that of the values while they travel.
            device: what the process group moves.
            process_group: the ranks.
            name: what the values are, for events, debug mode and errors.
        """
        self._dtype, self._device, self._name = dtype, device, name
        self._process_group = process_group
        self._nbytes = dtype.itemsize * sum(numels.values())
        given: dict[int, slice] = {}
        taken: dict[int, slice] = {}
        rank, ends = process_group.rank(), itertools.accumulate(numels.values())
        for ((giver, taker), numel), end in zip(numels.items(), ends, strict=True):
            if giver == rank:
                given[taker] = slice(end - numel, end)
            if taker == rank:
                taken[giver] = slice(end - numel, end)
        self._given, self._taken = dict(sorted(given.items())), dict(sorted(taken.items()))
        self._transport = default_transport(process_group)
        self._transport.resolve(process_group, device)

    def launch(self, write: Access, read: Access) -> ExchangeInFlight:
        """Start it: a collective call.

        Args:
            write: gets memory for what this rank gives to each other one, and fills it at once.
            read: gets what each other one gave, in ``wait()`` or before; it is gone afterwards.

        Raises:
            PeerLostError: as ``ExchangeInFlight.wait``.
            CollectiveMismatchError: in debug mode, if the ranks did not come to the same one.
        """
        group, name = self._process_group, self._name
        check_collective(EventKind.ALL_TO_ALL, name, group, nbytes=self._nbytes)
        sent = self._dtype.itemsize * sum(map(_length, self._given.values()))
        emit(EventKind.ALL_TO_ALL, name, rank=dist.get_rank(), nbytes=sent)
        with _saying_where(name):
            work = self._through_memory(write, read)
        return ExchangeInFlight(work or self._all_to_all(write, read), name)

    def _through_memory(self, write: Access, read: Access) -> dist.Work | None:
        def access(use: Access, places: Mapping[int, slice], region: torch.Tensor) -> None:
            values = region.view(self._dtype)
            use({rank: values[place] for rank, place in places.items()})

        return self._transport.exchange(
            self._process_group,
            self._device,
            self._nbytes,
            partial(access, write, self._given),
            partial(access, read, self._taken),
        )

    def _all_to_all(self, write: Access, read: Access) -> dist.Work:
        sent, to = self._buffer(self._given)
        received, came = self._buffer(self._taken)
        write(to)
        work = dist.all_to_all_single(
            received.view(torch.uint8),  # gloo knows fewer dtypes
            sent.view(torch.uint8),
            self._sizes(came),
            self._sizes(to),
            group=self._process_group,
            async_op=True,
        )
        assert work is not None, "it is asynchronous"
        return SeveralWorks((work,), partial(_arrived, sent, came, read))

    def _buffer(self, places: Mapping[int, slice]) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return memory for these values end to end, and the part of each rank, in order."""
        numels = list(map(_length, places.values()))
        whole = torch.empty(sum(numels), dtype=self._dtype, device=self._device)
        return whole, dict(zip(places, whole.split(numels), strict=True))

    def _sizes(self, parts: Mapping[int, torch.Tensor]) -> list[int]:
        """Return how many bytes go to or come from each rank."""
        sizes = [0] * self._process_group.size()
        for rank, part in parts.items():
            sizes[rank] = part.nbytes
        return sizes


def _arrived(sent: torch.Tensor, came: Mapping[int, torch.Tensor], read: Access) -> None:
    """Read what came; ``sent`` was kept until now, as the collective read it."""
    read(came)


def _length(place: slice) -> int:
    length: int = place.stop - place.start
    return length


@contextmanager
def _saying_where(name: str) -> Iterator[None]:
    """Let the error of a lost rank say in which exchange this one was."""
    try:
        yield
    except PeerLostError as error:
        error.say_where("exchange", name)
        raise
