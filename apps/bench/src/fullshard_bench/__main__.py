"""Runs the benchmark as `python -m fullshard_bench`."""

from __future__ import annotations

from fullshard_bench.cli import run

if __name__ == "__main__":
    run()
