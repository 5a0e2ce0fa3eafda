"""The norm of all gradients, and clipping by it."""

__all__: list[str] = []
