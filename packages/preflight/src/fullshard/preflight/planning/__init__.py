"""The memory of a run, on any number of ranks, before it starts."""

__all__: list[str] = []
