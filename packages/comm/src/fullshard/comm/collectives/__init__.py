"""Gather and reduce: the objects that put the parts together."""

__all__: list[str] = []
