"""Names of ``fullshard.checkpoint`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.checkpoint.boxes import Box, box_at, box_here
from fullshard.checkpoint.files.headers import DTYPE_NAMES, header_bytes
from fullshard.checkpoint.files.reading import Reader
from fullshard.checkpoint.files.sets import INDEX, SINGLE, find_files, read_set
from fullshard.checkpoint.files.write_errors import write_error
from fullshard.checkpoint.parts import STEP_NUMBERS, Place, as_cut, fitted, unwrapped, whole

__all__ = [
    "DTYPE_NAMES",
    "INDEX",
    "SINGLE",
    "STEP_NUMBERS",
    "Box",
    "Place",
    "Reader",
    "as_cut",
    "box_at",
    "box_here",
    "find_files",
    "fitted",
    "header_bytes",
    "read_set",
    "unwrapped",
    "whole",
    "write_error",
]
