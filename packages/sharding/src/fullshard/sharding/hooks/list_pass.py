"""One pass over the modules of a list that was sharded together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from fullshard.sharding.base.forward_pass import ForwardPass

__all__ = ["ListPass"]


class ListPass:
    """The modules of a list that have yet to run in the present pass; of one module, none.

    Attributes:
        place: of the pass in the post-forward order, or -1.
    """

    def __init__(self) -> None:
        """Start without a pass."""
        self.place = -1
        self._to_run: set[nn.Module] = set()
        self._shared: weakref.ref[ForwardPass] | None = None  # see [Note: forward pass]

    def begin(self, module: nn.Module, modules: Iterable[nn.Module]) -> bool:
        """Return whether ``module`` is the first of ``modules`` to run in its pass."""
        if module in self._to_run:
            self._to_run.discard(module)
            return False
        self._to_run = set(modules) - {module}
        self.place = -1
        return True

    @property
    def unfinished(self) -> bool:
        """Whether other modules have yet to run."""
        return bool(self._to_run)

    def shared(self) -> ForwardPass | None:
        """Return the forward pass that all modules share, if one awaits its backward."""
        found = None if self._shared is None else self._shared()
        return None if found is None or found.done else found

    def share(self, forward_pass: ForwardPass) -> None:
        """Let modules that follow have ``forward_pass``, too."""
        self._shared = weakref.ref(forward_pass)

    def reset(self) -> None:
        """Forget the pass."""
        self._to_run.clear()
        self._shared = None
