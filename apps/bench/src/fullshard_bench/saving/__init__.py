"""Measurements of checkpoints."""

__all__: list[str] = []
