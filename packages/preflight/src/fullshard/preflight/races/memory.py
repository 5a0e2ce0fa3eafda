"""The happens-before checker: who read and wrote which bytes, and whether anything ordered them.

Owns each piece of memory between its allocation and its end, and the four ways to be wrong:

- two accesses to a byte, at least one a write, by streams that no event orders;
- an access to memory before the stream that it was allocated on has come to the allocation, where
  the previous owner may still use the memory;
- memory that returns to the allocator of its stream, and is allocated again while another stream
  may still use it. A caching allocator reuses the memory for the next request on its stream. The
  checker assumes the very next allocation there, of any size; ``record_stream`` makes the memory
  wait;
- an access to bytes that a storage no longer has, because it was resized. A device reads another
  tensor's bytes there, or fails; the CPU ends the process.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fullshard.preflight.compat import storage_address
from fullshard.preflight.races.access import Line, here
from fullshard.preflight.races.names import Names
from fullshard.preflight.races.regions import Region, region_of
from fullshard.preflight.races.report import Access, Kind, Race
from fullshard.preflight.simulation.streams import Actor, Machine

__all__ = ["Allocation", "Memory", "Operation", "is_gone"]


@dataclass(frozen=True, slots=True)
class Operation:
    """A piece of work.

    Attributes:
        name: the operator's.
        actor: who does it.
        time: its number among all that the actor does.
        line: where it was issued.
        autograd: whether autograd chose the stream.
    """

    name: str
    actor: Actor
    time: int
    line: Line | None
    autograd: bool = False


@dataclass(eq=False, slots=True)
class Allocation:
    """Memory from its allocation to its end.

    Attributes:
        owner: whose allocator it comes from.
        nbytes: its size.
        made: the operation that allocated it; None: it was there before.
        uses: the last operation by actor, bytes and kind of access.
        recorded: those for whose work freeing waits.
        label: what is known of its purpose.
        freed: what took the memory away before this began; None: nothing did.
    """

    owner: Actor
    nbytes: int
    made: Operation | None
    uses: dict[tuple[int, Region, bool], Operation] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    label: str = ""
    freed: Operation | None = None


@dataclass(frozen=True, slots=True)
class _Freed:
    """Memory that went back to an allocator, and a use that was not known to be over then."""

    name: str
    use: Operation
    writes: bool
    freed: Operation


@dataclass(eq=False, slots=True)
class _Entry:
    reference: weakref.ref[torch.UntypedStorage]
    block: Allocation


class Memory:
    """The memory that operations of a machine use.

    Attributes:
        races: what was found, each pair of lines once, with how often.
    """

    def __init__(self, machine: Machine, names: Names) -> None:
        self._machine = machine
        self._names = names
        self._entries: dict[int, _Entry] = {}
        self._gone: deque[tuple[Allocation, Line | None]] = deque()
        self._making = False
        self._pools: dict[int, list[_Freed]] = {}  # by owner, what its next allocation may get
        self.races: dict[Race, int] = {}
        machine.before = self.settle

    # -- what is there ----------------------------------------------------------------------------

    def find(self, storage: torch.UntypedStorage) -> Allocation | None:
        """The memory of a storage; None if it was not seen before."""
        entry = self._entries.get(storage_address(storage))
        return None if entry is None or entry.reference() is None else entry.block

    def meet(self, tensor: torch.Tensor, made: Operation | None) -> Allocation:
        """The memory of a tensor; new memory was allocated by ``made`` or an unknown operation."""
        storage = tensor.untyped_storage()
        block = self.find(storage)
        if block is None:
            if self._making:  # at once, not in the order of a stream
                made = None
            owner = self._machine.default if made is None else made.actor
            block = Allocation(
                self._machine.host if self._making else owner, storage.nbytes(), made
            )
            self._adopt(storage, block)
            if made is not None:
                self._reuse(made)
        return block

    def _adopt(self, storage: torch.UntypedStorage, block: Allocation) -> None:
        address = storage_address(storage)

        def gone(reference: object) -> None:  # at any time: clocks must not change here
            entry = self._entries.get(address)
            if entry is not None and entry.reference is reference:
                del self._entries[address]
                self._gone.append((entry.block, here()))

        self._entries[address] = _Entry(weakref.ref(storage, gone), block)

    def keep_on_host(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's memory is the host's."""
        block = self.meet(tensor, None)
        block.owner, block.made = self._machine.host, None

    @contextmanager
    def making(self, *, on_host: bool) -> Iterator[None]:
        """Inside the ``with`` block new memory is the host's, or the device's."""
        before, self._making = self._making, on_host
        try:
            yield
        finally:
            self._making = before

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is the host's."""
        block = self.find(tensor.untyped_storage())
        return block is not None and block.owner is self._machine.host

    # -- allocating and freeing -------------------------------------------------------------------

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Follow a storage that got memory of another size, on the current stream."""
        self.settle()
        block, nbytes = self.find(storage), storage.nbytes()
        before = before if block is None else block.nbytes
        if nbytes == before:
            return
        if block is None:
            block = Allocation(self._machine.default, before, None)
        if before:
            self._freed(block, here())
        stream = self._machine.current()
        line = here()
        made = Operation("UntypedStorage.resize_", stream, stream.time, line)
        after = Allocation(stream, nbytes, made if nbytes else None, label=block.label)
        if nbytes < before:
            after.freed = Operation("freed", stream, stream.time, line)
        self._adopt(storage, after)
        if nbytes:
            self._reuse(made)

    def settle(self) -> None:
        """Look at the memory that went since this was called last."""
        while self._gone:
            self._freed(*self._gone.popleft())

    def _freed(self, block: Allocation, line: Line | None) -> None:
        owner, host = block.owner, self._machine.host
        if owner is host:  # allocators of page-locked memory wait for copies
            return
        for (number, region, writes), use in block.uses.items():
            after = owner.is_after(number, use.time) or host.is_after(number, use.time)
            if after or number in block.recorded or use.actor in (owner, host):
                continue
            freed = Operation("freed", owner, owner.time, line)
            name = self._named(block, region)
            self._pools.setdefault(owner.number, []).append(_Freed(name, use, writes, freed))

    def _reuse(self, made: Operation) -> None:
        """Look whether what an operation allocates may be memory that others still use."""
        for each in self._pools.pop(made.actor.number, ()):
            if not made.actor.is_after(each.use.actor.number, each.use.time):
                self._found(
                    Kind.FREED, each.name, (each.use, each.writes), (each.freed, True), made
                )

    # -- using ------------------------------------------------------------------------------------

    def use_gone(self, tensor: torch.Tensor, operation: Operation, *, writes: bool) -> None:
        """Note that an operation would use bytes which a storage no longer has."""
        block, region = self.meet(tensor, None), region_of(tensor)
        freed = block.freed or Operation("freed", self._machine.default, 0, None)
        name = self._named(block, region)
        self._found(Kind.GONE, name, (freed, True), (operation, writes))

    def use(self, tensor: torch.Tensor, operation: Operation, *, writes: bool) -> Allocation:
        """Follow an operation that reads or writes a tensor."""
        block = self.meet(tensor, None)
        if tensor.numel() == 0:
            return block
        region, actor = region_of(tensor), operation.actor
        unordered = [
            (use, wrote)
            for (number, other, wrote), use in block.uses.items()
            if (writes or wrote)
            and number != actor.number
            and not actor.is_after(number, use.time)
            and region.overlaps(other)
        ]
        made = block.made
        early = made is not None and not actor.is_after(made.actor.number, made.time)
        if made is not None and early and made not in [use for use, _ in unordered]:
            name = self._named(block, region)
            self._found(Kind.ALLOCATED, name, (made, True), (operation, writes))
        for each in unordered:
            self._found(Kind.ACCESS, self._named(block, region), each, (operation, writes))
        block.uses[actor.number, region, writes] = operation
        if operation.autograd:  # it records memory that it hands from stream to stream
            block.recorded.add(actor.number)
        return block

    def _found(
        self,
        kind: Kind,
        memory: str,
        first: tuple[Operation, bool],
        second: tuple[Operation, bool],
        reused: Operation | None = None,
    ) -> None:
        again = None if reused is None else _access(reused, True)
        race = Race(kind, memory, _access(*first), _access(*second), again)
        self.races[race] = self.races.get(race, 0) + 1

    def _named(self, block: Allocation, region: Region) -> str:
        for entry in list(self._entries.values()):  # an entry may be removed during the loop
            storage = entry.reference() if entry.block is block else None
            found = "" if storage is None else self._names.of(storage, region)
            if found:
                return found
        if block.label:
            return block.label
        made = block.made
        if made is None:
            return f"memory of {block.nbytes} bytes that was there before"
        return f"memory of {block.nbytes} bytes, allocated by {made.name} at {made.line}"


def _access(operation: Operation, writes: bool) -> Access:
    return Access(
        operation=operation.name,
        stream=operation.actor.name,
        line="an unknown line" if operation.line is None else str(operation.line),
        writes=writes,
    )


def is_gone(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers bytes that its storage, which was resized, no longer has."""
    return tensor.numel() > 0 and region_of(tensor).end > tensor.untyped_storage().nbytes()
