"""Checkpoints written while training goes on."""

__all__: list[str] = []
