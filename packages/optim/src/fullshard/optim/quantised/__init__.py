"""States of 8 bits and parameters of 16: codes, blocks, and rounding that no mesh changes."""

__all__: list[str] = []
