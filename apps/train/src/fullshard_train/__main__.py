"""Runs the trainer as `python -m fullshard_train`."""

from __future__ import annotations

from fullshard_train.cli import run

if __name__ == "__main__":
    run()
