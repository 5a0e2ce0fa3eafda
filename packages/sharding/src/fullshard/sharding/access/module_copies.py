"""Refuses to deep-copy or pickle a sharded module, and says what to do instead.

A shallow copy is left as it is.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["NoCopies"]


class NoCopies:
    """A module that holds process groups and hooks, which no copy of it could have."""

    def __copy__(self) -> Any:
        """Returns what ``copy.copy`` gives of any module: one beside it that shares all it has."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuses.

        Raises:
            TypeError: always, saying what to do instead.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be deep-copied: the copy would share process groups and "
            "hooks with the original; build a second model, fully_shard it, and load this one's "
            "state_dict()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuses to be pickled, by ``torch.save(model)`` say.

        Raises:
            TypeError: always, saying what to do instead.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: it holds process groups and hooks; save its "
            "state_dict() with torch.distributed.checkpoint, or full_state_dict(model) with "
            "torch.save, and load that into a model that was built and sharded anew"
        )
