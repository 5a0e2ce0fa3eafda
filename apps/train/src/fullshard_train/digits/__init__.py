"""The task of telling handwritten digits."""

__all__: list[str] = []
