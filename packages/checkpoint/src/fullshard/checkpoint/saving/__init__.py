"""Checkpoints that are written during training."""

__all__: list[str] = []
