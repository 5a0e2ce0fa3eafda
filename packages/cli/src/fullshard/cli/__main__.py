"""``python -m fullshard.cli``."""

from __future__ import annotations

import sys

from fullshard.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
