"""Looks closer at a difference, in a second run of the same program."""

__all__: list[str] = []
