"""The memory that a collective reads and fills."""

__all__: list[str] = []
