"""Code around a module's forward and backward: hooks, schedule, forward passes."""

__all__: list[str] = []
