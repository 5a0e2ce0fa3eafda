"""Steps of optimizers elsewhere than parameters live, which an extension of steps carries out."""

from __future__ import annotations

from fullshard.comm.spi import EXTENSIONS, import_installed
from fullshard.sharding import STEP_EXTENSIONS

__all__ = ["require_steps_elsewhere"]


def require_steps_elsewhere(policy: str) -> None:
    """Raise unless a package is installed that steps copies of shards.

    Raises:
        ImportError: if none is.
    """
    import_installed(EXTENSIONS)
    if not STEP_EXTENSIONS:
        raise ImportError(
            f"{policy} needs an optimizer that steps copies of shards, and no installed package "
            "offers one: pip install fullshard-optim"
        )
