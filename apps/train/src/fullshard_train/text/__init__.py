"""The task of predicting the next byte of a text."""

__all__: list[str] = []
