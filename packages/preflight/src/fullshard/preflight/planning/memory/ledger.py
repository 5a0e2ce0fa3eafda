"""Follows every storage that operations touch: live storages, their purposes, and the largest sum.

Owns what a storage is taken for. The category follows from the whole life of a storage, not from
its allocation: a buffer that a reduction fills becomes gradients, and an output that backward needs
an activation.
"""

from __future__ import annotations

import enum
import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor

from fullshard.preflight.compat import DispatchMode, answer, in_mesh, is_fake
from fullshard.preflight.costs.pages import Allocations
from fullshard.preflight.planning.memory.course import Course
from fullshard.preflight.planning.memory.inside import Inside, gloo_bytes
from fullshard.preflight.planning.memory.places import Place, Places
from fullshard.preflight.planning.memory.storages import Storages
from fullshard.preflight.planning.reads import HostReads
from fullshard.preflight.planning.recorder import Ran, Recorder
from fullshard.preflight.races.collectives import Launched
from fullshard.preflight.tensors import local_tensors

__all__ = ["Category", "Ledger", "Peak"]


class Category(enum.IntEnum):
    """The purpose of memory. Of several, a storage counts under the first.

    Attributes:
        SHARDS: sharded parameters.
        OPTIMIZER_STATE: optimizer state.
        GRADIENTS: sharded gradients.
        GATHERED: gathered parameters.
        UNREDUCED: gradients before their reduction.
        COLLECTIVES: buffers of collectives.
        BATCH: the batch.
        ACTIVATIONS: activations.
        TEMPORARY: tensors that live for a moment.
        INSIDE: memory inside operations and collectives.
    """

    SHARDS = 0
    OPTIMIZER_STATE = 1
    GRADIENTS = 2
    GATHERED = 3
    UNREDUCED = 4
    COLLECTIVES = 5
    BATCH = 6
    ACTIVATIONS = 7
    TEMPORARY = 8
    INSIDE = 9

    @property
    def title(self) -> str:
        """Return the text for a report."""
        return _TITLES[self]


_TITLES = {
    Category.SHARDS: "parameters, sharded",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.GRADIENTS: "gradients, sharded",
    Category.GATHERED: "parameters, gathered",
    Category.UNREDUCED: "gradients before reduction",
    Category.COLLECTIVES: "buffers of collectives",
    Category.BATCH: "batch",
    Category.ACTIVATIONS: "activations",
    Category.TEMPORARY: "temporary",
    Category.INSIDE: "inside operations and collectives",
}


@dataclass(slots=True)
class Peak:
    """The moment at which most memory was alive.

    Attributes:
        nbytes: how much.
        place: where in the step.
        operation: the operation after which it was seen.
        sizes: bytes of each storage that was alive, by its number.
        inside: bytes that operations and collectives had inside themselves, behind no tensor.
        host: the most bytes of the host's memory, at a moment of their own.
    """

    nbytes: int = 0
    place: Place = field(default_factory=partial(Place, "construction"))
    operation: str = ""
    sizes: dict[int, int] = field(default_factory=dict)
    inside: int = 0
    host: int = 0


class Reservation:
    """Memory inside a collective, which counts as long as this object lives."""

    def __init__(self, ledger: Ledger, nbytes: int) -> None:
        self._ledger, self._nbytes = ledger, nbytes
        ledger.reserved += nbytes

    def __del__(self) -> None:
        """Free the memory."""
        self._ledger.reserved -= self._nbytes


class Ledger(DispatchMode):
    """Looks, after each operation of this thread, at all storages that any has read or written.

    Args:
        places: returns the place of an operation in the step.
        recorder: receives each operation, too, if there is a recorder.
        inside: knows what operations allocate inside themselves; None: that does not count.

    Attributes:
        peak: the moment at which most memory was alive.
        tensors: the most bytes of tensors after any operation.
        course: the most bytes at each place of the step, and what they consist of.
        kernels: the names of the attention kernels that ran.
        reserved: bytes inside collectives that were launched and not waited for.
        reads: answers what the host reads.
    """

    def __init__(
        self, places: Places, recorder: Recorder | None = None, inside: Inside | None = None
    ) -> None:
        super().__init__()
        self._places = places
        self._recorder = recorder
        self._inside = inside
        self.course = Course()
        allocations = Allocations() if recorder is None else recorder.allocations
        self._storages = Storages(changed=allocations.changed, counted=self.course.changed)
        self._following = ExitStack()
        self._born: dict[int, Place] = {}
        self._found: dict[int, Category] = {}
        self._filled_from: dict[int, set[int]] = {}
        self.peak = Peak()
        self.tensors = 0
        self.kernels: set[str] = set()
        self.reserved = 0
        self.reads = HostReads()

    @property
    def now(self) -> int:
        """Bytes that are alive now."""
        return self._storages.nbytes()

    @property
    def host(self) -> Storages:
        """The record of memory that belongs to the host, on a simulated accelerator."""
        return self._storages

    def sizes(self) -> dict[int, int]:
        """Bytes of each storage that is alive now, by its number."""
        return self._storages.sizes()

    def by_category(self, sizes: Mapping[int, int]) -> dict[Category, int]:
        """The bytes of storages added up by what they are taken for."""
        categories = dict.fromkeys(Category, 0)
        for number, nbytes in sizes.items():
            categories[self.category_of(number)] += nbytes
        return categories

    def course_by_category(self) -> dict[Place, dict[Category, int]]:
        """Return what the most bytes at each place consist of."""
        parts = self.course.parts(self.category_of, Category.INSIDE)
        return {
            place: {each: found[each] for each in Category if found.get(each)}
            for place, found in parts.items()
        }

    def __enter__(self) -> Self:
        """Begin to look."""
        self._following = ExitStack()
        self._following.enter_context(self._storages.followed())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Look no more."""
        super().__exit__(*error)
        self._following.close()

    def restart(self) -> None:
        """Forget the peak and the course, but not what is alive.

        Collects garbage first: what cycles of references keep depends on when Python looks.
        """
        gc.collect()
        self.peak, self.tensors = Peak(), 0
        self.course.restart(self.sizes())
        if self._recorder is not None:
            self._recorder.restart()

    def reserve(self, launched: Launched) -> Reservation:
        """Return what counts as memory inside a collective until it is dropped."""
        made = Reservation(self, gloo_bytes(launched))
        self._look(f"c10d::{launched.name}")
        return made

    def note(self, category: Category, *values: Any) -> None:
        """Note a category of the tensors in ``values``, in addition to other categories."""
        for tensor in local_tensors(values):
            self._note(self._number(tensor), category)

    def _note(self, number: int, category: Category) -> None:
        self._found[number] = min(category, self._found.get(number, category))

    def _number(self, tensor: torch.Tensor) -> int:
        number = self._storages.number(tensor)
        if number not in self._born:
            self._born[number] = self._places.now()
        return number

    def _numbers(self, *values: Any) -> set[int]:
        return {self._number(each) for each in local_tensors(values) if self._counts(each)}

    def _counts(self, tensor: torch.Tensor) -> bool:
        """Whether it is memory of the training, not what a mesh of ranks keeps for itself."""
        return is_fake(tensor) or not (self._places.now().phase == "construction" or in_mesh())

    def category_of(self, number: int) -> Category:
        """Return the category of a storage, by all observations so far."""
        born = self._born.get(number)  # None: it was the host's before any operation saw it
        in_forward = born is not None and born.phase == "forward"
        guess = Category.ACTIVATIONS if in_forward else Category.TEMPORARY
        return self._found.get(number, guess)

    def born_in(self, number: int) -> str:
        """The module that was running when a storage was first seen."""
        return self._born[number].module

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, then look."""
        found = answer(func, args)  # most calls are questions for a device
        if found is not None:
            return found
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor first: its local operations come back here
        if func.namespace == "prim":
            return func(*args, **kwargs or {})
        kwargs = kwargs or {}
        recorder = self._recorder
        read = self.reads.answer(func, args)
        if read is not None:
            if recorder is not None:
                recorder.host_read()
            return read
        move = None if recorder is None else recorder.launched(func, args, kwargs)
        try:
            result, inside = func(*args, **kwargs), 0
        except Exception:
            self._places.fail()
            raise
        self.reads.follow(func, args, result)
        if self._inside is not None:
            inside, result = self._inside.seen(func, args, kwargs, result)
        with self._hosts_alike(args, kwargs):
            self._follow(func, args, kwargs, result)
            self._look(func._schema.name, inside)
        if recorder is not None:
            recorder.ran(Ran(func, args, kwargs, result), move, self._storages)
        return result

    def _hosts_alike(self, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        """Results of what works on the host's memory alone are the host's."""
        if not self._storages.has_host:
            return nullcontext()
        given = list(local_tensors((args, list(kwargs.values()))))
        on_host = self._storages.is_hosts_work(given)
        return self._storages.making(on_host=True) if on_host else nullcontext()

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        read, written = self._numbers(args, list(kwargs.values())), self._numbers(result)
        if func.namespace == "c10d":
            self._follow_collective(func, read | written)
        elif "attention" in func._schema.name:
            self.kernels.add(func._schema.name)
        elif func._schema.is_mutable:
            for number in written or read:
                self._filled_from.setdefault(number, set()).update(read)

    def _look(self, operation: str, inside: int = 0) -> None:
        """Sum the live bytes, and those inside the operation that ran."""
        tensors, place = self._storages.nbytes(), self._places.now()
        inside += self.reserved
        total = tensors + inside
        self.tensors = max(self.tensors, tensors)
        self.course.look(place, total, inside)
        if total > self.peak.nbytes:
            sizes, host = self._storages.sizes(), self.peak.host
            self.peak = Peak(total, place, operation, sizes, inside, host)
        self.peak.host = max(self.peak.host, self._storages.host)

    def _follow_collective(self, func: Any, numbers: set[int]) -> None:
        reduces = "reduce" in func._schema.name
        for number in numbers:
            self._note(number, Category.COLLECTIVES)
            for source in self._filled_from.get(number, ()) if reduces else ():
                self._note(source, Category.UNREDUCED)
