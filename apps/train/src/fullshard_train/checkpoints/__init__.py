"""Checkpoints of a run: their contents, their folders, weights alone."""

__all__: list[str] = []
