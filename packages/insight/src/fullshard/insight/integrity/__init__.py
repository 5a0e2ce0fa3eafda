"""Finds damaged numbers: in collectives, in shards and optimizer state, in computations."""

__all__: list[str] = []
