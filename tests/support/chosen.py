"""Which accelerator the tests run on, as an environment variable that rank processes inherit."""

from __future__ import annotations

import os

CHOSEN = "FULLSHARD_TEST_DEVICE"


def chosen() -> bool:
    """Return whether tests run on the asynchronous device: after ``pytest --device async``."""
    return os.environ.get(CHOSEN) == "async"
