"""The usual causes of a difference, and how each is found."""

__all__: list[str] = []
