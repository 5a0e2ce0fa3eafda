"""Ranks: how they start, as hosts or in turns, and which process groups they use."""

__all__: list[str] = []
