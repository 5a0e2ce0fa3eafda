"""Which forwards of a group await their backward, as all ranks can know it.

Owns that count and nothing else. [Note: shared facts] What a rank communicates may depend only on
what all ranks see alike: forwards, backwards, optimizer steps. When a graph dies is not such a
thing: rank 0 may keep an output in a list, a cycle may wait for the garbage collector, a worker
thread may drop the last reference late. So the death of a graph gives memory back and never changes
what is communicated: here a forward whose graph died counts until the parameters change.
"""

from __future__ import annotations

from fullshard.sharding.base.generation import ParameterGeneration

__all__ = ["Outstanding"]


class Outstanding:
    """The grad-enabled forwards of one group that no backward has ended.

    Attributes:
        generation: that of the group's parameters.
    """

    def __init__(self, generation: ParameterGeneration) -> None:
        """Starts with none."""
        self.generation = generation
        self._numbers: set[int] = set()
        self._abandoned = False
        self._of = generation.number

    def _refresh(self) -> None:
        if self._of != self.generation.number:
            self._of = self.generation.number
            self.clear()

    def __bool__(self) -> bool:
        """Whether any forward of this parameter generation awaits its backward."""
        self._refresh()
        return self._abandoned or bool(self._numbers)

    def __contains__(self, number: int) -> bool:
        """Whether forward ``number`` does."""
        self._refresh()
        return number in self._numbers

    def add(self, number: int) -> None:
        """Counts a forward."""
        self._refresh()
        self._numbers.add(number)

    def abandon(self, number: int) -> None:
        """Stops tracking a forward whose graph died; that one awaited its backward stays a fact."""
        self._refresh()
        if number in self._numbers:
            self._numbers.discard(number)
            self._abandoned = True

    def end(self, number: int) -> bool:
        """Ends a forward, and tells whether it was counted and is the last."""
        self._refresh()
        counted = number in self._numbers
        self._numbers.discard(number)
        return counted and not self._numbers and not self._abandoned

    def clear(self) -> None:
        """Forgets all."""
        self._numbers.clear()
        self._abandoned = False
