"""What tests of the trainer begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer.jobs import TEXT


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small corpus."""
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path
