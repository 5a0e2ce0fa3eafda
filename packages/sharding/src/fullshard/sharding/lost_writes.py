"""Warns who writes into full parameters that a forward left unsharded.

Owns that warning. A forward without gradients leaves the root unsharded, as in torch, until its
parameters change, so ``model.parameters()`` gives full ones after an evaluation. To mix them with
sharded ones is torch's error; to write into them is none, and what was written is lost when the
group is resharded. Looked at only then, by version counters, which foreach kernels also move.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fullshard.sharding.compat import version_of
from fullshard.sharding.param import FSDPParam

__all__ = ["LostWrites"]


class LostWrites:
    """The full parameters of one group as they were when a forward or backward left them."""

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        """Starts with none noted."""
        self._params = params
        self._versions: list[int] = []

    def note(self) -> None:
        """Notes how the full parameters are; they stay unsharded for now."""
        if not self._versions:
            self._versions = [version_of(param.unsharded) for param in self._params]

    def forget(self) -> None:
        """Forgets what was noted: somebody who may write has them now."""
        self._versions = []

    def warn(self) -> None:
        """Warns if one was changed in place since they were noted; they are resharded now."""
        if not self._versions:
            return
        noted, self._versions = self._versions, []
        changed = [
            param.name
            for param, version in zip(self._params, noted, strict=True)
            if version_of(param.unsharded) != version
        ]
        if changed:
            warnings.warn(
                f"{', '.join(changed)} changed in place while a forward without gradients had left "
                "the full parameters in the module; the change is lost. Call reshard() on the "
                "model before changing parameters(), or change full ones inside "
                "`with fullshard.sharding.unsharded(module, writeback=True):`",
                RuntimeWarning,
                stacklevel=2,
            )
