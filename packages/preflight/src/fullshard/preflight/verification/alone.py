"""Runs what one rank alone runs: a collective in it would wait for ranks that never come."""

from __future__ import annotations

from typing import Any

from fullshard.preflight.compat import DispatchMode

__all__ = ["Alone"]

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class Alone(DispatchMode):
    """A context in which a collective raises instead of waiting."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation.

        Raises:
            RuntimeError: if it is a collective.
        """
        if func.namespace in _COLLECTIVES:
            raise RuntimeError(
                f"the unsharded model, or its loss, called {func.name()}, a collective, and rank 0 "
                "runs it alone. Compute what ranks share, such as a number of tokens, in batch, "
                "which all of them call, or pass tokens=; split the model in shard"
            )
        return func(*args, **(kwargs or {}))
