"""Compares layer by layer, for a model that fits nowhere unsharded."""

__all__: list[str] = []
