"""Checks of the machines and the connections of a run, before it starts."""

__all__: list[str] = []
