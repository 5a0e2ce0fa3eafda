"""Positions of shards in the buffer of a collective: pure arithmetic and views."""

__all__: list[str] = []
