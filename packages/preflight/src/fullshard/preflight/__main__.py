"""``doctor``, ``plan``, ``verify`` and ``races``: ``python -m fullshard.preflight``."""

from __future__ import annotations

import sys

from fullshard.preflight.commands.command_line import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
