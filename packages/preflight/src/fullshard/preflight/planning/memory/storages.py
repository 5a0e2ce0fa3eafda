"""Tensor storages as things with a number: live storages, and storages that share memory.

Owns weak references to storages. A storage's address is reused after its death, so each gets a
number of its own when it is first seen. Several storages may show the same pages of a file, which
count once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from fullshard.preflight.compat import storage_address
from fullshard.preflight.tensors import resizes_told

__all__ = ["Sharing", "Storages"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """The owner of a storage's memory.

    Attributes:
        sharers: how many processes count it in equal parts.
        file: the file whose first pages it is; empty if it is memory of its own.
    """

    sharers: int = 1
    file: str = ""


_OWN = Sharing()


@dataclass(slots=True)
class _Known:
    """A storage that was seen: its name, its last size, and its owner."""

    reference: weakref.ref[torch.UntypedStorage]
    number: int
    nbytes: int
    sharing: Sharing
    on_host: bool = False


class Storages:
    """Numbers for storages, by first sight, and how many bytes they hold together.

    Inside ``followed()`` the sum is kept as storages are seen, resized and freed; outside of it,
    all are asked. Of a simulated accelerator some storages are the host's memory, and are added up
    apart; all memory belongs to the device until ``keep_on_host()``.

    Attributes:
        host: bytes of the host's memory, inside ``followed()``.
        has_host: whether any storage was ever the host's.

    Args:
        sharing: returns the owner of a tensor's memory.
        changed: called with a storage's number and bytes when they change inside ``followed()``.
        counted: called with a storage's number and what it adds to the bytes of the device.
    """

    def __init__(
        self,
        sharing: Callable[[torch.Tensor], Sharing] = lambda tensor: _OWN,
        changed: Callable[[int, int], None] = lambda number, nbytes: None,
        counted: Callable[[int, int], None] = lambda number, more: None,
    ) -> None:
        self._known: dict[int, _Known] = {}
        self._shared: dict[int, _Known] = {}
        self._own = 0
        self._seen = 0
        self._making: bool | None = None
        self.host = 0
        self.has_host = False
        self._sharing = sharing
        self._changed = changed
        self._counted = counted
        self._following = False

    def number(self, tensor: torch.Tensor) -> int:
        """The number of the tensor's storage; the same as long as the storage lives."""
        storage = tensor.untyped_storage()
        address = storage_address(storage)
        entry = self._known.get(address)
        if entry is not None and entry.reference() is not None:
            if self._following and storage.nbytes() != entry.nbytes:
                self._measure(entry, storage)
            return entry.number
        self._seen += 1
        reference = weakref.ref(storage, partial(self._forget, address, self._seen))
        entry = _Known(reference, self._seen, 0, self._sharing(tensor), self._making is True)
        self._known[address] = entry
        if entry.sharing is not _OWN:
            self._shared[address] = entry
        self._measure(entry, storage)
        return self._seen

    def _measure(self, entry: _Known, storage: torch.UntypedStorage) -> None:
        now = storage.nbytes()
        self._count(entry, now - entry.nbytes)
        if self._following and now != entry.nbytes:
            self._changed(entry.number, now)
        entry.nbytes = now

    def _count(self, entry: _Known, more: int) -> None:
        if entry.on_host:
            self.host += more
        elif entry.sharing is _OWN:
            self._own += more
            self._counted(entry.number, more)

    def _forget(self, address: int, number: int, reference: object) -> None:
        entry = self._known.get(address)
        if entry is not None and entry.number == number:  # else another has its address by now
            del self._known[address]
            self._count(entry, -entry.nbytes)
            self._shared.pop(address, None)
            if self._following:
                self._changed(number, 0)

    def keep_on_host(self, tensor: torch.Tensor) -> None:
        """Note that a tensor's memory is the host's."""
        self.has_host = True
        self.number(tensor)
        entry = self._known[storage_address(tensor.untyped_storage())]
        if not entry.on_host:
            self._count(entry, -entry.nbytes)
            entry.on_host = True
            self._count(entry, entry.nbytes)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is the host's."""
        if not self.has_host:
            return False
        entry = self._known.get(storage_address(tensor.untyped_storage()))
        return entry is not None and entry.on_host and entry.reference() is not None

    def is_hosts_work(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether who works on these tensors is the host: all but single numbers are its memory."""
        if not self.has_host:
            return False
        large = [each for each in tensors if each.numel() > 1] or tensors
        return bool(large) and all(map(self.is_on_host, large))

    @contextmanager
    def making(self, *, on_host: bool) -> Iterator[None]:
        """Inside the ``with`` block new storages are the host's, or the device's.

        An outer block has precedence.
        """
        before = self._making
        self._making = on_host if before is None else before
        self.has_host |= on_host
        try:
            yield
        finally:
            self._making = before

    def _resized(self, storage: torch.UntypedStorage, before: int) -> None:
        entry = self._known.get(storage_address(storage))
        if entry is not None and entry.reference() is not None:
            self._measure(entry, storage)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Keep sums up to date inside the ``with`` block. No operation reports a resize."""
        self._ask_all()
        self._following = True
        try:
            with resizes_told(self._resized):
                yield
        finally:
            self._following = False

    def _ask_all(self) -> None:
        for entry in tuple(self._known.values()):
            storage = entry.reference()
            if storage is not None:
                self._measure(entry, storage)

    def nbytes(self) -> int:
        """Bytes that all storages seen so far hold now: of shared ones this process's part."""
        if not self._following:
            self._ask_all()
        return self._own + sum(_parts(self._shared.values()).values())

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each live storage of the device, by number; see ``nbytes``."""
        if not self._following:
            self._ask_all()
        return _parts(each for each in self._known.values() if not each.on_host)


def _parts(known: Iterable[_Known]) -> dict[int, int]:
    """Bytes by number; for storages of the same pages of a file, only the largest counts."""
    sizes: dict[int, int] = {}
    files: dict[str, int] = {}
    for entry in known:
        part, file = entry.nbytes // entry.sharing.sharers, entry.sharing.file
        if file:
            seen = files.get(file, 0)
            files[file] = max(part, seen)
            part = files[file] - seen
        sizes[entry.number] = part
    return sizes
