"""Checkpoints in the memory of this host and of the next one."""

__all__: list[str] = []
